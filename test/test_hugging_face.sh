#!/usr/bin/env bash
# scripts/convert_hf import, and --load: models of our own trainer, there and back.
# shellcheck source=test/python.sh
source "$(dirname "$0")/python.sh"
python_tests hugging_face_tests
