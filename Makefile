# llm8.c, by make:
#   make quickstart      from nothing to a trained model; DATA=any.txt trains on your own text
#   make                 the CPU trainer, the tokenizer, the corpus' writer
#   make train_gptcu     the GPU trainer, for the GPU in this machine, or else for several kinds
#   make test            everything that needs no GPU; as root, installs what is missing for it
#   make test-gpu        the GPU's tests, on a GPU
#   make bench           whole steps on the GPU, timed; MODELS= PRECISIONS= ITERS= RESULTS=
#   make scripts         the Python packages of compare, plot, monitor and the others in scripts/
#   make clean           removes what make has built, but not .venv
# For those who change it:
#   make lint            layout, includes, defects; needs clang-format-14, cppcheck, shellcheck
#   make fuzz            SECONDS=600 JOBS=16 RUNS=10000000 SEED=2; make fuzz-carry: for elsewhere
#   make readme          tables and figure in the pages, from records and --help
#   make golden          the values that tests compare with, by PyTorch and transformers
#   make cuda            what nvcc alone can check; make gpu-programs: what make test-gpu runs
# Variables, for any of these; if one changes, what depends on it is built again:
#   NATIVE=              without -march=native, for programs that run on other machines
#   ARCHS="90a 100a"     for these GPUs (compute capability without its point; 90a: Hopper)
#   PTX=90               for newer ones besides, compiled as they start
#   CUDA_HOME=FOLDER     where CUDA is, if not in /usr/local/cuda
#   WERROR=1             warnings are errors, as in .ci/run

CC      ?= gcc
NATIVE  ?= -march=native
WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wpointer-arith
ifeq ($(WERROR),1)
WARN    += -Werror
CU_WARN := ,-Werror -Werror all-warnings
endif
# no fast-math: NaN must stay NaN. The three flags below change no result's meaning: they let loops
# vectorise and use fused multiply-add.
CFLAGS  ?= -O3 -g
BASE    := -std=gnu11 -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=fast $(WARN)
LDLIBS  := -lcjson -lz -lm -lpthread

BUILD   := build
COMMON  := $(wildcard base/*.c model/*.c ranks/*.c checkpoints/*.c train/*.c) \
           $(filter-out dataloader/tokenize.c,$(wildcard dataloader/*.c))
CPU     := kernels/cpu.c kernels/cpu_gemm.c kernels/rope.c
PROGRAMS := train_gpt tokenize make_corpus
GPU_C   := $(filter-out $(CPU),$(wildcard kernels/*.c)) $(wildcard train/gpu/*.c)
GPU_CU  := $(wildcard kernels/*.cu)
TESTS   := $(patsubst test/test_%.c,%,$(wildcard test/test_*.c))

objects = $(patsubst %.c,$(BUILD)/$(1)/%.c.o,$(2))

# A variable on the command line must be a word here or in a script that a target calls, outside of
# comments.
GIVEN := $(foreach v,$(.VARIABLES),$(if $(findstring command line,$(origin $v)),$v))
ifneq ($(GIVEN),)
UNKNOWN := $(filter-out $(shell sed 's/\#.*//' Makefile scripts/quickstart.sh scripts/llm8/bench.py \
               test/run.sh test/gpu*.sh | grep -oE '\b[A-Z][A-Z0-9_]+\b' | sort -u),$(GIVEN))
$(if $(UNKNOWN),$(error no variable of this Makefile: $(UNKNOWN) (make help)))
endif

.DELETE_ON_ERROR:
.PHONY: all help quickstart scripts test fuzz lint readme golden clean FORCE

all: $(PROGRAMS)

help: # prints the comment at the top of this file
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

train_gpt: $(call objects,plain,train_gpt.c $(COMMON) $(CPU))
tokenize: $(call objects,plain,dataloader/tokenize.c dataloader/loader.c dataloader/blend.c \
            dataloader/tokenizer.c base/io.c base/host.c base/common.c)
make_corpus: $(call objects,plain,scripts/make_corpus.c base/common.c)
$(PROGRAMS):
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS)

$(BUILD)/plain/%.c.o: %.c $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(NATIVE) $(BASE) -MMD -MP -c $< -o $@

# The compilers and flags of all objects. If they change, the file changes, so that all objects are built
# again; packages may be missing then. Expanded here, because targets below add flags of their own.
FLAGS := $(CC) $(CXX) $(CFLAGS) $(NATIVE) $(filter-out -Werror,$(BASE)) $(LDLIBS)
$(BUILD)/c.flags: FORCE
	@echo '$(FLAGS)' | cmp -s - $@ || { CC='$(CC)' CFLAGS='$(CFLAGS)' scripts/packages.sh make && \
	    mkdir -p $(@D) && echo '$(FLAGS)' >$@; }

quickstart:
	@scripts/quickstart.sh

# ---- the GPU half: only code that launches kernels is .cu ----------------------------------------

CUDA_HOME ?= /usr/local/cuda
NVCC      ?= $(CUDA_HOME)/bin/nvcc
# The GPUs in this machine, which nvidia-smi is asked for once, where something is built for them.
GPUS       = $(eval GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
                 2>/dev/null | sed -n 's/^\([0-9]*\)\.\([0-9]\) *$$/\1\2/p' | sort -u | \
                 sed 's/^90$$/90a/'))$(GPUS)
ARCHS     ?= $(or $(GPUS),80 89 90a)
PTX       ?= $(if $(GPUS),,90)
CUDA_ARCH  = $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) \
             $(foreach a,$(PTX),-gencode arch=compute_$(a),code=compute_$(a))
CUDAFLAGS  = -std=c++17 -O3 -Xcompiler -fopenmp,-Wall,-Wno-unknown-pragmas$(CU_WARN) $(CUDA_ARCH)
CUDALIBS  := -L$(CUDA_HOME)/lib64 -lcublasLt -lcudnn -lcudart -lstdc++ -ldl

CUDA_FLAGS = $(NVCC) $(subst $(CU_WARN),,$(CUDAFLAGS))
$(BUILD)/cuda.flags: FORCE
	@echo '$(CUDA_FLAGS)' | cmp -s - $@ || { command -v $(NVCC) >/dev/null || { \
	    echo 'error: no $(NVCC): the GPU trainer needs CUDA; make CUDA_HOME=FOLDER says where it is' \
	        >&2; exit 1; }; mkdir -p $(@D) && echo '$(CUDA_FLAGS)' >$@; }

$(BUILD)/plain/%.cu.o: %.cu $(BUILD)/cuda.flags
	@mkdir -p $(@D)
	$(NVCC) $(CUDAFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

gpu_objects := $(call objects,plain,$(GPU_C)) $(GPU_CU:%.cu=$(BUILD)/plain/%.cu.o)
$(call objects,plain,$(GPU_C) test/cudnn_plans.c): CFLAGS += -isystem $(CUDA_HOME)/include

train_gptcu: $(BUILD)/plain/train_gpt.cu.o $(gpu_objects) $(call objects,plain,$(COMMON) $(CPU))
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS) $(CUDALIBS)

GPU_TESTS := $(patsubst test/%.cu,$(BUILD)/plain/%,$(wildcard test/*.cu))
$(GPU_TESTS): $(BUILD)/plain/%: $(BUILD)/plain/test/%.cu.o $(gpu_objects) \
                                $(call objects,plain,$(COMMON) $(CPU))
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS) $(CUDALIBS) $(TEST_LDFLAGS)
# it plants faults into matmuls
$(BUILD)/plain/test_gpu_convergence: TEST_LDFLAGS = -Wl,--wrap=gemm
# they plant faults before the norms
$(BUILD)/plain/test_gpu_flips $(BUILD)/plain/standin_flips $(BUILD)/asan/standin_flips: \
    TEST_LDFLAGS = -Wl,--wrap=gpu_norm_forward,--wrap=gpu_norm_backward

# the kernels and their tests as PTX for older GPUs alone, which a newer one's driver compiles
PTX_TEST := $(BUILD)/plain/test_gpu_kernels_ptx80
$(BUILD)/ptx80/%.cu.o: private CUDA_ARCH = -gencode arch=compute_80,code=compute_80
$(BUILD)/ptx80/%.cu.o: %.cu $(BUILD)/cuda.flags
	@mkdir -p $(@D)
	$(NVCC) $(CUDAFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@
$(PTX_TEST): $(patsubst %.cu,$(BUILD)/ptx80/%.cu.o,test/test_gpu_kernels.cu $(GPU_CU)) \
             $(call objects,plain,$(GPU_C) $(COMMON) $(CPU))
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS) $(CUDALIBS)

.PHONY: gpu-programs cuda test-gpu bench
cuda: $(GPU_TESTS) $(BUILD)/plain/train_gpt.cu.o
gpu-programs: train_gpt train_gptcu tokenize make_corpus $(BUILD)/plain/compare_tensors \
              $(BUILD)/plain/logits_tool $(GPU_TESTS) $(PTX_TEST)

# SANITIZE_GPU=1: compute-sanitizer besides. LLM8_BIN=FOLDER: run the programs there, build nothing
test-gpu:
	@test/gpu.sh --has-gpu
	@$(if $(LLM8_BIN),,$(MAKE) gpu-programs)
	@test/gpu.sh

# LLM8_BIN as above
bench:
	@test/gpu.sh --has-gpu
	@$(if $(LLM8_BIN),,$(MAKE) train_gptcu)
	@scripts/bench

# ---- tests: every test/test_NAME.c is a program --------------------------------------------------

SANITIZE := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# -O2 halves the time of programs that compute much, and costs a second of compilation. The tests
# themselves take longer to compile than to run.
$(call objects,asan,$(CPU)) $(call objects,fuzzer,$(CPU)): SANITIZE += -O2
$(BUILD)/asan/test/%.c.o: private SANITIZE += -O0
$(BUILD)/plain/test/%.c.o: private CFLAGS := -O1
# what test_NAME.c is linked with; test_train_*.c include train_gpt.c
LIBRARY := $(COMMON) $(CPU)

$(BUILD)/asan/%.c.o: %.c $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CC) $(SANITIZE) $(NATIVE) $(BASE) -MMD -MP -c $< -o $@

PLAIN_TESTS := $(TESTS:%=$(BUILD)/plain/test_%)
ASAN_TESTS := $(TESTS:%=$(BUILD)/asan/test_%)
$(PLAIN_TESTS): $(BUILD)/plain/%: $(BUILD)/plain/test/%.c.o $(call objects,plain,$(LIBRARY))
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS) $(TEST_LDFLAGS)
$(ASAN_TESTS): $(BUILD)/asan/%: $(BUILD)/asan/test/%.c.o $(call objects,asan,$(LIBRARY))
	$(CC) $(SANITIZE) $(BASE) $^ -o $@ $(LDLIBS) $(TEST_LDFLAGS)
$(BUILD)/asan/train_gpt: $(call objects,asan,train_gpt.c $(COMMON) $(CPU))
	$(CC) $(SANITIZE) $(BASE) $^ -o $@ $(LDLIBS)

# prints our logits, for the comparisons with transformers
$(BUILD)/plain/logits_tool: $(call objects,plain,test/logits_tool.c $(LIBRARY))
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS)

# The library reports to the fuzzer which code an input reaches. Without -march=native, so that the
# fuzzer also runs on other machines.
FUZZED := $(COMMON:%.c=$(BUILD)/fuzz/%.c.o)
FUZZER := $(call objects,fuzzer,test/fuzz.c test/fuzz_targets.c $(CPU))
$(BUILD)/fuzz/%.c.o: %.c $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CC) $(SANITIZE) -fsanitize-coverage=trace-pc $(BASE) -MMD -MP -c $< -o $@
$(BUILD)/fuzzer/%.c.o: %.c $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CC) $(SANITIZE) $(BASE) -MMD -MP -c $< -o $@
$(BUILD)/asan/fuzz: $(FUZZER) $(FUZZED)
	@mkdir -p $(@D)
	$(CC) $(SANITIZE) $(BASE) $^ -o $@ $(LDLIBS) -Wl,--wrap=die,-rpath,'$$ORIGIN'

# inputs at which a program fails are left in build/fuzz/folder
fuzz: SECONDS ?= 60
fuzz: JOBS ?= $(shell nproc)
fuzz: RUNS ?= 1000000000000
fuzz: SEED ?= 1
fuzz: $(BUILD)/asan/fuzz
	@mkdir -p $(BUILD)/fuzz/folder
	cd $(BUILD)/fuzz/folder && ../../asan/fuzz $(SECONDS) $(JOBS) $(RUNS) $(SEED)

# the fuzzer and its libraries, to run in any folder of a machine without a compiler
.PHONY: fuzz-carry
fuzz-carry: $(BUILD)/asan/fuzz
	@mkdir -p $(BUILD)/fuzz-carry
	cp -L $< $$(ldd $< | grep -oE '/[^ ]*/lib(asan|ubsan|cjson|z|gomp|gcc_s|stdc\+\+)\.so[^ ]*') \
	    $(BUILD)/fuzz-carry

# test_faults.c makes each of these calls fail
FAULTS := open fopen fwrite fflush fclose fsync close rename mkdir symlink unlink rmdir \
          pread readlink opendir readdir malloc calloc realloc aligned_alloc
$(BUILD)/plain/test_faults $(BUILD)/asan/test_faults: TEST_LDFLAGS = $(FAULTS:%=-Wl,--wrap=%)

$(BUILD)/plain/compare_tensors: $(call objects,plain,test/compare_tensors.c \
                                  checkpoints/safetensors.c base/io.c base/host.c base/common.c)
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS)

# All tests run under the sanitizers. Tests whose results depend on how the compiler orders and fuses
# arithmetic also run with the flags of users' programs.
ARITHMETIC := cpu cpu_gemm fp8 gemm model muon train_gpt train_precision train_steps
TEST_PROGRAMS := $(ARITHMETIC:%=$(BUILD)/plain/test_%) $(ASAN_TESTS)
SHELL_TESTS := $(wildcard test/test_*.sh) $(wildcard test/*_tests.py)
# the GPU trainer without a GPU, where there is a C++ compiler
ifneq ($(shell command -v $(CXX)),)
STANDIN_TRAINERS := $(BUILD)/plain/standin_trainer $(BUILD)/asan/standin_trainer
STANDIN_TESTS := $(BUILD)/asan/standin_spikes \
                 $(addprefix $(BUILD)/plain/standin_,large muon kernels parts flips)
EMULATED_TESTS := $(BUILD)/plain/emulated_attention $(BUILD)/plain/emulated_fused
endif
# cuDNN's plans without a GPU, where it is installed
ifneq ($(wildcard $(CUDA_HOME)/include/cudnn.h),)
CUDNN_TESTS := $(BUILD)/plain/cudnn_plans
endif
# the longest first, so that no core waits at the end
ALL_TESTS := $(SHELL_TESTS) $(TEST_PROGRAMS) $(STANDIN_TESTS) $(EMULATED_TESTS) $(CUDNN_TESTS) $(BUILD)/asan/fuzz
# Tests that sleep most of the time, until a time limit has passed. They run by themselves, because
# beside tests that compute, other time limits would pass too. The shortest and the longest first.
TIMED_TESTS := $(foreach test,watch rendezvous ranks_trouble.sh ranks_train.sh,$(filter %/test_$(test),$(ALL_TESTS)))
JOBS ?= $(shell nproc) # test programs at the same time

.PHONY: run-tests
test: # another make, which sees a C++ compiler that has just been installed
	@CC='$(CC)' CFLAGS='$(CFLAGS)' scripts/packages.sh --install --tests 'make test'
	@$(MAKE) --no-print-directory run-tests
run-tests: $(PROGRAMS) $(BUILD)/asan/train_gpt $(BUILD)/asan/fuzz \
      $(STANDIN_TRAINERS) $(BUILD)/plain/logits_tool $(BUILD)/plain/compare_tensors \
      $(TEST_PROGRAMS) $(STANDIN_TESTS) $(EMULATED_TESTS) $(CUDNN_TESTS)
	JOBS=$(JOBS) JOBS_LAST=2 test/run.sh $(filter-out $(TIMED_TESTS),$(ALL_TESTS)) -- $(TIMED_TESTS)

lint: scripts
	@scripts/lint.sh

readme: train_gpt scripts
	@scripts/results

# Without a GPU, over stand-ins for CUDA, its libraries, NCCL and our kernels: the GPU trainer with
# its C; test_comm with train/gpu/comm.c as it is
COMM_ON_STANDIN := train/gpu/comm.c kernels/nccl.c kernels/gpu.c test/standin/cuda_runtime.c
GEMM_ON_STANDIN := kernels/gemm.c kernels/gpu.c \
                   $(addprefix test/standin/,matmuls.c values.c cuda_runtime.c)
GPU_ON_STANDIN := $(filter-out kernels/attention%,$(GPU_C)) \
                  $(filter-out %/nccl.c %/driver.c,$(wildcard test/standin/*.c))
# variables that are never set hold 0xfe, so that no test passes because they happen to be 0 (gcc 12,
# clang 8)
UNSET := -ftrivial-auto-var-init=pattern
UNSET := $(shell $(CC) $(UNSET) -E -x c /dev/null >/dev/null 2>&1 && echo $(UNSET))
STANDIN_H := -isystem test/standin -DGEMM_WORKSPACE_BYTES=4096 -DRESTORE_PIECE=16384
STANDIN_CXX := -x c++ -std=c++17 -fopenmp -fno-exceptions -Wall -Wextra -Wno-missing-field-initializers \
               $(filter -Werror,$(WARN)) \
               $(UNSET) $(STANDIN_H) -MD -MP
# these are compiled for longer than they run
$(BUILD)/plain/standin/test/%.cu.o $(BUILD)/plain/emulated/%.cu.o: private CFLAGS := -O1
$(BUILD)/plain/standin/%.cu.o: %.cu $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CXX) $(CFLAGS) $(NATIVE) $(STANDIN_CXX) -c $< -o $@
$(BUILD)/asan/standin/%.cu.o: %.cu $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE) $(NATIVE) $(STANDIN_CXX) -c $< -o $@
standin_objects = $(call objects,$(1)/standin,$(GPU_ON_STANDIN)) $(call objects,$(1),$(LIBRARY))
# test/standin/faults.c
FAULT_HOOKS := -Wl,--wrap=run_batch,--wrap=gpu_sum_losses,--wrap=gpu_embedding_forward \
               -Wl,--wrap=gpu_sum_of_squares,--wrap=gpu_adamw,--wrap=gpu_fp8_update \
               -Wl,--wrap=safetensors_write
$(BUILD)/plain/standin_trainer: $(BUILD)/plain/standin/train_gpt.cu.o
$(BUILD)/asan/standin_trainer: $(BUILD)/asan/standin/train_gpt.cu.o
# the tests of test/test_gpu_NAME.cu that run over the stand-ins too: the trainer, Muon, the table of
# launchers, the optimizer's parts, flipped bits
ON_STANDINS := spikes large muon kernels parts flips
plain_standins := $(ON_STANDINS:%=$(BUILD)/plain/standin_%)
asan_standins := $(ON_STANDINS:%=$(BUILD)/asan/standin_%)
$(plain_standins): $(BUILD)/plain/standin_%: $(BUILD)/plain/standin/test/test_gpu_%.cu.o
$(asan_standins): $(BUILD)/asan/standin_%: $(BUILD)/asan/standin/test/test_gpu_%.cu.o
$(BUILD)/plain/standin_trainer $(plain_standins): $(call standin_objects,plain)
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS) $(FAULT_HOOKS) $(TEST_LDFLAGS) -lstdc++
$(BUILD)/asan/standin_trainer $(asan_standins): $(call standin_objects,asan)
	$(CC) $(SANITIZE) $(BASE) $^ -o $@ $(LDLIBS) $(FAULT_HOOKS) $(TEST_LDFLAGS) -lstdc++
$(STANDIN_TRAINERS): | $(BUILD)/standin/libnccl.so.2 # loaded by several ranks
$(BUILD)/plain/standin/%.c.o: %.c $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(NATIVE) $(BASE) $(UNSET) $(STANDIN_H) -MD -MP -c $< -o $@
$(BUILD)/asan/standin/%.c.o: %.c $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CC) $(SANITIZE) $(NATIVE) $(BASE) $(UNSET) $(STANDIN_H) -MD -MP -c $< -o $@

# the kernels over kernels/hopper.cuh on an emulated multiprocessor. Without UNSET: gcc 12 then
# clears bytes of what a lambda has captured. Threads change places by longjmp, which glibc's
# fortification takes for a fault
EMULATED_CXX := $(filter-out $(UNSET),$(STANDIN_CXX)) -isystem test/emulated \
                -fno-strict-aliasing -Wno-unknown-pragmas -U_FORTIFY_SOURCE -include test/emulated/hopper.h
$(BUILD)/plain/emulated/%.cu.o: %.cu $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CXX) $(CFLAGS) $(NATIVE) $(EMULATED_CXX) -c $< -o $@
$(BUILD)/plain/emulated_attention: $(addprefix $(BUILD)/plain/emulated/kernels/attention,_queries.cu.o \
                                           64_backward.cu.o 128_keys.cu.o)
$(BUILD)/plain/emulated_fused: $(BUILD)/plain/emulated/kernels/fused_matmul.cu.o \
                               $(BUILD)/plain/emulated/kernels/wide_matmul.cu.o
$(BUILD)/plain/emulated_%: $(BUILD)/plain/emulated/test/emulated/%.cu.o $(call standin_objects,plain)
	$(CC) $(CFLAGS) $(BASE) $^ -o $@ $(LDLIBS) $(FAULT_HOOKS) -lstdc++

$(BUILD)/standin/libnccl.so.2: test/standin/nccl.c $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(BASE) -isystem test/standin -fPIC -shared $< -o $@ -lpthread
# under the name that cuDNN loads it by
$(BUILD)/standin/libcuda.so.1: test/standin/driver.c $(BUILD)/c.flags
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -Wall -fPIC -shared -Wl,-soname,$(@F) $< -o $@
$(BUILD)/plain/cudnn_plans: $(call objects,plain,test/cudnn_plans.c kernels/gpu.c $(wildcard base/*.c)) \
                            $(BUILD)/standin/libcuda.so.1
	$(CC) $(CFLAGS) $(BASE) -Wl,--no-as-needed $^ -Wl,--as-needed -o $@ $(LDLIBS) $(CUDALIBS) \
	    -Wl,-rpath,'$$ORIGIN/../standin',-rpath,$(CUDA_HOME)/lib64
$(foreach b,plain asan,$(call objects,$(b),test/test_comm.c test/test_gemm.c)): \
    BASE += -isystem test/standin
$(BUILD)/plain/test_comm: $(call objects,plain/standin,$(COMM_ON_STANDIN) train/gpu/verify_nccl.c)
$(BUILD)/asan/test_comm: $(call objects,asan/standin,$(COMM_ON_STANDIN) train/gpu/verify_nccl.c)
$(BUILD)/plain/test_gemm: $(call objects,plain/standin,$(GEMM_ON_STANDIN))
$(BUILD)/asan/test_gemm: $(call objects,asan/standin,$(GEMM_ON_STANDIN))

golden: train_gpt .venv/golden
	.venv/bin/python test/golden.py
.venv/golden: .venv/ready
	PYTHONPATH= .venv/bin/pip install --quiet -e '.[golden]'
	touch $@

# the Python around the trainers, in an environment of its own
PYTHON ?= python3
scripts: .venv/ready
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: make scripts needs Python 3.11 or newer (PYTHON=python3.11) with venv:' \
	       'apt-get install python3-venv' >&2; exit 1; }
	@echo 'installing Python packages (520 MB) into .venv; this takes some minutes'
	$(PYTHON) -m venv .venv
	PYTHONPATH= .venv/bin/pip install --quiet --disable-pip-version-check -e '.[data,report,boards,lint]'
	touch $@

clean:
	rm -rf $(BUILD) $(PROGRAMS) train_gptcu

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
