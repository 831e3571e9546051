#include "nccl.h"

#include <dlfcn.h>
#include <string.h>

// Stores the address of a function of the library in *function, a pointer to a function: memcpy,
// because C has no cast to it from void *. Returns false if the library lacks the function.
static bool find(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof(found));
    return found != NULL;
}

bool nccl_load(Nccl *n) {
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return fail("several GPUs need NCCL: %s; install it (Debian and Ubuntu: libnccl2; pip: "
                    "nvidia-nccl-cu13), or add the folder of libnccl.so.2 to LD_LIBRARY_PATH",
                    dlerror());
    }
#define FIND(name) find(library, "nccl" #name, &n->name)
    bool ok = FIND(GetVersion) && FIND(GetUniqueId) && FIND(CommInitRank) && FIND(CommDestroy) &&
              FIND(CommGetAsyncError) && FIND(GetErrorString) && FIND(AllReduce) &&
              FIND(ReduceScatter) && FIND(AllGather) && FIND(Send) && FIND(Recv) &&
              FIND(GroupStart) && FIND(GroupEnd);
    int version = 0;
    if (!ok || n->GetVersion(&version) != NCCL_SUCCESS || version < NCCL_OLDEST) {
        // up to 2.8 a version was 1000 major + 100 minor
        int major = version < 10000 ? version / 1000 : version / 10000;
        int minor = version < 10000 ? version / 100 % 10 : version / 100 % 100;
        return fail("libnccl.so.2 is version %d.%d; 2.10 or newer is needed", major, minor);
    }
    return true;
}
