/* Answers of CANN that must not be zero for torch_npu to believe in one device. The prototypes are
 * those of the public ACL headers; everything else that torch_npu links to answers zero. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uintptr_t next_handle = 0x2000;

int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtGetDevice(int32_t *device) { *device = 0; return 0; }
int aclrtGetCurrentContext(void **context) { *context = (void *)0x1000; return 0; }
int aclrtCreateContext(void **context, int32_t device) { return aclrtGetCurrentContext(context); }
int aclrtCreateStream(void **stream) { *stream = (void *)(next_handle += 16); return 0; }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag)
{
    return aclrtCreateStream(stream);
}
const char *aclrtGetSocName(void) { return "Ascend910_9391"; }
const char *aclGetRecentErrMsg(void) { return ""; }

int aclrtMalloc(void **memory, size_t bytes, int policy)
{
    *memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *memory == NULL;
}
int aclrtMallocAlign32(void **memory, size_t bytes, int policy)
{
    return aclrtMalloc(memory, bytes, policy);
}
int aclrtFree(void *memory) { free(memory); return 0; }
int aclrtMallocHost(void **memory, size_t bytes) { return aclrtMalloc(memory, bytes, 0); }
int aclrtFreeHost(void *memory) { free(memory); return 0; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind)
{
    memcpy(to, from, bytes);
    return 0;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream)
{
    memcpy(to, from, bytes);
    return 0;
}
int aclrtGetMemInfo(int attribute, size_t *unused, size_t *total)
{
    *unused = (size_t)8 << 30;
    *total = (size_t)64 << 30;
    return 0;
}

size_t aclGetCompileoptSize(int option) { return 8; }
int aclGetCompileopt(int option, char *value, size_t bytes)
{
    memset(value, 0, bytes);
    value[0] = '0';
    return 0;
}
int aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return 0; }
int aclrtSetSysParamOpt(int option, int64_t value) { return 0; }
