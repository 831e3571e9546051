# llm8.c: `make quickstart` trains a small model from nothing; `make` builds the CPU trainer.
#
# make BLAS=openblas   matrix products of the CPU trainer by OpenBLAS instead of our own
# make NATIVE=         without -march=native, for binaries that run on other machines

CC      ?= gcc
NATIVE  ?= -march=native
BLAS    ?= own
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wpointer-arith
# no fast-math: NaN must stay NaN. The three flags below change no result's meaning: they let loops
# vectorise and use fused multiply-add.
CFLAGS  ?= -O3 -g
BASE    := -std=gnu11 -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast $(WARN)
LDLIBS  := -lcjson -lz -lm -lpthread
ifeq ($(BLAS),openblas)
BASE    += -DLLM8_OPENBLAS
LDLIBS  += -lopenblas
else ifneq ($(BLAS),own)
$(error BLAS=$(BLAS): must be own or openblas)
endif

BUILD   := build
COMMON  := $(wildcard train/*.c checkpoints/*.c) dataloader/shard.c dataloader/loader.c \
           dataloader/tokenizer.c
CPU     := kernels/cpu.c kernels/cpu_gemm.c
PROGRAMS := train_gpt tokenize make_corpus
TESTS   := $(patsubst test/test_%.c,%,$(wildcard test/test_*.c))

objects = $(patsubst %.c,$(BUILD)/$(1)/%.c.o,$(2))

.DELETE_ON_ERROR:
.PHONY: all quickstart test test-asan fuzz lint bench-cpu golden clean

all: $(PROGRAMS)

train_gpt: $(call objects,plain,train_gpt.c $(COMMON) $(CPU))
tokenize: $(call objects,plain,dataloader/tokenize.c dataloader/shard.c dataloader/tokenizer.c \
            checkpoints/io.c train/common.c)
make_corpus: $(call objects,plain,scripts/make_corpus.c train/common.c)
$(PROGRAMS):
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS)

$(BUILD)/plain/%.c.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(NATIVE) $(BASE) -MMD -MP -c $< -o $@

clean:
	rm -rf $(BUILD) $(PROGRAMS)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
