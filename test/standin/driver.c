// CUDA's driver on a machine without a device, for cuDNN and its compiler while they make plans
// (test/cudnn_plans.c). It accepts code without loading it, and refuses everything else that they
// look up.

enum { SUCCESS, STUB_LIBRARY = 34 }; // CUresult

int cuInit(unsigned flags) {
    return flags == 0 ? SUCCESS : STUB_LIBRARY;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuLibraryLoadData(const void **library) {
    *library = "a library";
    return SUCCESS;
}

int cuLibraryGetKernel(const void **kernel) {
    *kernel = "a kernel";
    return SUCCESS;
}

#define REFUSES(name)        \
    int name(void) {         \
        return STUB_LIBRARY; \
    }
#define REFUSE(a, b, c, d) REFUSES(cu##a) REFUSES(cu##b) REFUSES(cu##c) REFUSES(cu##d)
REFUSE(CtxGetCurrent, CtxGetDevice, CtxGetLimit, CtxPopCurrent)
REFUSE(CtxPushCurrent, DeviceGet, DeviceGetAttribute, DeviceGetCount)
REFUSE(DevicePrimaryCtxRelease, DevicePrimaryCtxReset, DevicePrimaryCtxRetain, FuncGetAttribute)
REFUSE(FuncSetAttribute, GetErrorName, GetErrorString, GetExportTable)
REFUSE(KernelGetAttribute, KernelSetAttribute, LaunchCooperativeKernel, LaunchKernel)
REFUSE(LaunchKernelEx, LibraryLoadFromFile, LibraryUnload, LinkAddData)
REFUSE(LinkAddData_v2, LinkAddFile_v2, LinkComplete, LinkCreate)
REFUSE(LinkCreate_v2, LinkDestroy, MemcpyDtoH_v2, ModuleGetFunction)
REFUSE(ModuleGetGlobal_v2, ModuleLoadData, ModuleLoadDataEx, ModuleLoadFatBinary)
REFUSE(ModuleUnload, OccupancyMaxActiveBlocksPerMultiprocessor, OccupancyMaxPotentialClusterSize,
       StreamGetCtx)
REFUSE(StreamSynchronize, TensorMapEncodeTiled, _none, _none2)

int cuGetProcAddress_v2(const char *name, int (**function)(void)) {
    (void)name;
    *function = cuStreamGetCtx;
    return SUCCESS;
}
