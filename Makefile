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
PROGRAMS := train_gpt tokenize
TESTS   := $(patsubst test/test_%.c,%,$(wildcard test/test_*.c))

objects = $(patsubst %.c,$(BUILD)/$(1)/%.c.o,$(2))

.DELETE_ON_ERROR:
.PHONY: all quickstart test fuzz lint bench-cpu golden clean

all: $(PROGRAMS)

train_gpt: $(call objects,plain,train_gpt.c $(COMMON) $(CPU))
tokenize: $(call objects,plain,dataloader/tokenize.c dataloader/shard.c dataloader/tokenizer.c \
            checkpoints/io.c train/common.c)
$(PROGRAMS):
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS)

$(BUILD)/plain/%.c.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(NATIVE) $(BASE) -MMD -MP -c $< -o $@

# ---- tests: every test/test_NAME.c is a program, built plainly and under the sanitizers ----------

SANITIZE := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# what test_NAME.c needs besides the library; test_model.c includes train_gpt.c
LIBRARY := $(COMMON) $(CPU)

$(BUILD)/asan/%.c.o: %.c
	@mkdir -p $(@D)
	$(CC) $(SANITIZE) $(NATIVE) $(BASE) -MMD -MP -c $< -o $@

$(BUILD)/plain/test_%: $(BUILD)/plain/test/test_%.c.o $(call objects,plain,$(LIBRARY))
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS) $(TEST_LDFLAGS)
$(BUILD)/asan/test_%: $(BUILD)/asan/test/test_%.c.o $(call objects,asan,$(LIBRARY))
	$(CC) $(SANITIZE) $(BASE) $^ -o $@ $(LDLIBS) $(TEST_LDFLAGS)
$(BUILD)/asan/train_gpt: $(call objects,asan,train_gpt.c $(COMMON) $(CPU))
	$(CC) $(SANITIZE) $(BASE) $^ -o $@ $(LDLIBS)

TEST_PROGRAMS := $(TESTS:%=$(BUILD)/plain/test_%) $(TESTS:%=$(BUILD)/asan/test_%)
.SECONDARY:

test: $(PROGRAMS) $(BUILD)/asan/train_gpt $(TEST_PROGRAMS)
	test/run.sh $(TEST_PROGRAMS) $(wildcard test/test_*.sh)

clean:
	rm -rf $(BUILD) $(PROGRAMS)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
