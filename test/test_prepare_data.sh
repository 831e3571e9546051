#!/usr/bin/env bash
# scripts/prepare_data, and the C encoder against the tokenizers it writes for.
# shellcheck source=test/python.sh
source "$(dirname "$0")/python.sh"
python_tests prepare_data_tests
