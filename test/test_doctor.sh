#!/usr/bin/env bash
# scripts/doctor on runs of the CPU trainer, whole and with faults planted in them.
# shellcheck source=test/python.sh
source "$(dirname "$0")/python.sh"
python_tests doctor_tests
