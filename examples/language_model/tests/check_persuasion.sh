#!/bin/sh
# The tokenizer on a whole novel: check_persuasion.sh PROGRAM DATA_FOLDER. Exits with 77 when the data are not there.
model=$2/SmolLM2-135M-Instruct.Q4_1.gguf
text=$2/persuasion.txt
expected=107714
if [ ! -s "$model" ] || [ ! -s "$text" ]; then
  echo "SKIPPED: no model or no novel in $2; fetch.sh brings them"
  exit 77
fi
counted=$("$1" tokens --model "$model" --text "$text") || exit 1
if [ "$counted" != "$expected" ]; then
  echo "FAILED: $text has $counted tokens, expected $expected"
  exit 1
fi
echo "passed: $text has $counted tokens"
