#!/usr/bin/env bash
# scripts/estimate, with a GPU trainer that only prints plans.
# shellcheck source=test/python.sh
source "$(dirname "$0")/python.sh"
python_tests estimate_tests
