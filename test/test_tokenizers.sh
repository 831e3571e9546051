#!/usr/bin/env bash
# Tokenizers of every kind, from their libraries into shards, the C encoder and samples.
# shellcheck source=test/python.sh
source "$(dirname "$0")/python.sh"
python_tests tokenizer_tests
