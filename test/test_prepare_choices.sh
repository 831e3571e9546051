#!/usr/bin/env bash
# scripts/prepare_choices, --eval-choices and --eval-only.
# shellcheck source=test/python.sh
source "$(dirname "$0")/python.sh"
python_tests choice_tests
