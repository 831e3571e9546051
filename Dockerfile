# llm8.c with CUDA, cuDNN and NCCL, on any NVIDIA GPU from compute capability 8.0 on:
#   git archive HEAD | docker build --tag llm8 -
#   docker run --rm --gpus all llm8                            # checks driver, libraries and matmuls
#   docker run --rm -it --gpus all --ipc host -v "$PWD/run:/llm8/run" llm8 make quickstart
# Without a GPU: docker build --build-arg IMAGE=debian:12 --build-arg PROGRAMS=all
ARG IMAGE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
FROM $IMAGE
ARG PROGRAMS="all train_gptcu"
WORKDIR /llm8
COPY . .
RUN scripts/packages.sh --install --tests make
RUN make -j NATIVE= $PROGRAMS
RUN make scripts
CMD if [ -e train_gptcu ]; then ./train_gptcu --verify; else ./train_gpt --version; fi
