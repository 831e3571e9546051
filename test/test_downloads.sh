#!/usr/bin/env bash
# Known sets and tokenizers by name, fetched from a server on this machine.
# shellcheck source=test/python.sh
source "$(dirname "$0")/python.sh"
python_tests download_tests
