// The driver: memory, streams, events, kernels, captures.

#include "standin.h"
#include <dlfcn.h>

namespace {

std::atomic<bool> initialized{false};
// What this thread captures.
thread_local Graph *begun = nullptr;
std::mutex pinned_mutex;
std::map<const char *, size_t> pinned;

struct Function {
    std::string name;
    void (*launch)(const unsigned *, unsigned, unsigned, void **);
    std::vector<size_t> sizes;
    int shared_most = 48 << 10;
};


bool is_pinned(const void *data, size_t bytes) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    auto block = pinned.upper_bound((const char *)data);
    if (block == pinned.begin()) return false;
    --block;
    return (const char *)data + bytes <= block->first + block->second;
}

// What a thread that captures may not do: it spoils what is captured.
Status uncaptured() {
    if (!begun) return SUCCESS;
    begun->failed = CAPTURE_INVALIDATED;
    return CAPTURE_UNSUPPORTED;
}

Status unwaited(Stream *stream) {
    if (!stream->capture) return SUCCESS;
    stream->capture->failed = CAPTURE_INVALIDATED;
    return CAPTURE_UNSUPPORTED;
}

} // namespace

API Status cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    initialized = true;
    return devices().empty() ? 100 : SUCCESS;
}
API Status cuDriverGetVersion(int *version) {
    *version = atoi(setting("STANDIN_DRIVER", "12080").c_str());
    return SUCCESS;
}
API Status cuDeviceGetCount(int *count) {
    *count = (int)devices().size();
    return initialized ? SUCCESS : NOT_INITIALIZED;
}
API Status cuDeviceGet(int *device, int ordinal) {
    if (!initialized) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= (int)devices().size()) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
API Status cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, "Stand-in GPU");
    return device < (int)devices().size() ? SUCCESS : INVALID_DEVICE;
}
API Status cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0x5a, 16);
    uuid[15] = (unsigned char)device;
    return SUCCESS;
}
API Status cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = devices()[device]->total;
    return SUCCESS;
}
API Status cuDeviceGetAttribute(int *value, int attribute, int) {
    int capability = atoi(setting("STANDIN_CAPABILITY", "90").c_str());
    switch (attribute) {
    case 16: *value = 4; break;                // multiprocessors
    case 75: *value = capability / 10; break;  // major
    case 76: *value = capability % 10; break;  // minor
    case 97: *value = 227 << 10; break;        // shared memory of a block that asks for it
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
API Status cuDevicePrimaryCtxRetain(Device **context, int device) {
    *context = devices()[device];
    return SUCCESS;
}
API Status cuCtxSetCurrent(Device *context) {
    current = context;
    return SUCCESS;
}
API Status cuCtxSynchronize() {
    if (Status status = context()) return status;
    if (Status status = uncaptured()) return status;
    std::unique_lock<std::mutex> lock(current->mutex);
    std::vector<Stream *> all = current->streams;
    lock.unlock();
    for (Stream *stream : all) stream->wait();
    return current->failed;
}
API Status cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (Status status = context()) return status;
    std::lock_guard<std::mutex> lock(current->mutex);
    *free = current->total - current->used, *total = current->total;
    return SUCCESS;
}
API Status cuMemAlloc_v2(Address *address, size_t bytes) {
    if (Status status = context()) return status;
    if (Status status = uncaptured()) return status;
    if (bytes == 0) return INVALID_VALUE;
    std::lock_guard<std::mutex> lock(current->mutex);
    if (current->used + bytes > current->total) return OUT_OF_MEMORY;
    void *data = aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (!data) return OUT_OF_MEMORY;
    // Not a number in any dtype.
    memset(data, 0xff, bytes);
    *address = (Address)data;
    current->blocks[*address] = bytes;
    current->used += bytes;
    return SUCCESS;
}
API Status cuMemFree_v2(Address address) {
    if (Status status = cuCtxSynchronize()) return status;
    std::lock_guard<std::mutex> lock(current->mutex);
    auto block = current->blocks.find(address);
    if (block == current->blocks.end()) return INVALID_VALUE;
    current->used -= block->second;
    memset((void *)address, 0xff, block->second);
    free((void *)address);
    current->blocks.erase(block);
    return SUCCESS;
}
API Status cuMemHostAlloc(void **data, size_t bytes, unsigned) {
    if (Status status = context()) return status;
    if (Status status = uncaptured()) return status;
    if (bytes == 0) return INVALID_VALUE;
    std::lock_guard<std::mutex> lock(pinned_mutex);
    *data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    pinned[(const char *)*data] = bytes;
    return SUCCESS;
}
API Status cuMemFreeHost(void *data) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    if (!pinned.erase((const char *)data)) return INVALID_VALUE;
    free(data);
    return SUCCESS;
}
API Status cuStreamCreate(Stream **stream, unsigned flags) {
    if (Status status = context()) return status;
    if (flags != 1) return INVALID_VALUE;
    *stream = new Stream(current);
    std::lock_guard<std::mutex> lock(current->mutex);
    current->streams.push_back(*stream);
    return SUCCESS;
}
API Status cuStreamSynchronize(Stream *stream) {
    if (Status status = on(stream)) return status;
    if (Status status = unwaited(stream)) return status;
    stream->wait();
    return current->failed;
}
API Status cuEventCreate(Event **event, unsigned flags) {
    if (Status status = context()) return status;
    // With times.
    if (flags != 0) return INVALID_VALUE;
    *event = new Event;
    (*event)->device = current;
    return SUCCESS;
}
API Status cuEventDestroy_v2(Event *event) {
    // It may still be waited for: what waits has its mark.
    delete event;
    return SUCCESS;
}
API Status cuEventRecord(Event *event, Stream *stream) {
    if (Status status = on(stream)) return status;
    if (event->device != current) return INVALID_HANDLE;
    if (stream->capture) {
        event->captured = stream->capture;
        return SUCCESS;
    }
    auto mark = event->renewed();
    stream->put([mark] { mark->pass(); });
    return SUCCESS;
}
API Status cuEventRecordWithFlags(Event *event, Stream *stream, unsigned flags) {
    if (flags == 0) return cuEventRecord(event, stream);
    if (Status status = on(stream)) return status;
    if (flags != 1 || !stream->capture) return INVALID_VALUE;
    stream->capture->nodes.push_back({[] {}, event});
    return SUCCESS;
}
API Status cuStreamWaitEvent(Stream *stream, Event *event, unsigned) {
    if (Status status = on(stream)) return status;
    if (event->captured) {
        if (stream->capture && stream->capture != event->captured) return CAPTURE_ISOLATION;
        stream->capture = event->captured;
        stream->capture->streams.insert(stream);
        return SUCCESS;
    }
    if (stream->capture) {
        stream->capture->failed = CAPTURE_INVALIDATED;
        return CAPTURE_ISOLATION;
    }
    if (auto mark = event->latest()) stream->put([mark] { mark->wait(); });
    return SUCCESS;
}
API Status cuEventQuery(Event *event) {
    if (Status status = context()) return status;
    if (event->captured) return CAPTURED_EVENT;
    auto mark = event->latest();
    return !mark || mark->is_passed() ? SUCCESS : NOT_READY;
}
API Status cuEventSynchronize(Event *event) {
    if (Status status = context()) return status;
    if (event->captured) return CAPTURED_EVENT;
    if (auto mark = event->latest()) mark->wait();
    return current->failed;
}
API Status cuEventElapsedTime(float *milliseconds, Event *start, Event *end) {
    if (Status status = context()) return status;
    auto from = start->latest(), to = end->latest();
    if (!from || !to) return INVALID_HANDLE;
    if (!from->is_passed() || !to->is_passed()) return NOT_READY;
    *milliseconds = (float)(1e3 * (to->at - from->at));
    return SUCCESS;
}
API Status cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, Stream *stream) {
    if (Status status = on(stream)) return status;
    if (!current->holds(to, bytes)) return INVALID_VALUE;
    if (is_pinned(from, bytes)) {
        stream->compute([=] { memcpy((void *)to, from, bytes); });
        return SUCCESS;
    }
    if (Status status = unwaited(stream)) return status;
    auto copy = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
    stream->compute([=] { memcpy((void *)to, copy->data(), bytes); });
    return SUCCESS;
}
API Status cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, Stream *stream) {
    if (Status status = on(stream)) return status;
    if (!current->holds(from, bytes)) return INVALID_VALUE;
    bool direct = is_pinned(to, bytes);
    if (Status status = direct ? SUCCESS : unwaited(stream)) return status;
    stream->compute([=] { memcpy(to, (const void *)from, bytes); });
    if (!direct) stream->wait();
    return current->failed;
}
API Status cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream *stream) {
    if (Status status = on(stream)) return status;
    if (!current->holds(to, bytes) || !current->holds(from, bytes)) return INVALID_VALUE;
    stream->compute([=] { memmove((void *)to, (const void *)from, bytes); });
    return SUCCESS;
}
API Status cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Stream *stream) {
    if (Status status = on(stream)) return status;
    if (!current->holds(to, bytes)) return INVALID_VALUE;
    stream->compute([=] { memset((void *)to, value, bytes); });
    return SUCCESS;
}

API Status cuModuleLoadData(void **module, const char *image) {
    if (Status status = context()) return status;
    if (Status status = uncaptured()) return status;
    if (strncmp(image, IMAGE, strlen(IMAGE))) return INVALID_IMAGE;
    *module = dlopen(image + strlen(IMAGE), RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "stand-in: %s\n", dlerror());
    return *module ? SUCCESS : INVALID_IMAGE;
}
API Status cuModuleGetFunction(Function **function, void *module, const char *name) {
    auto launch = dlsym(module, (std::string("launch_") + name).c_str());
    auto sizes = (const unsigned long *(*)())dlsym(module, (std::string("sizes_") + name).c_str());
    if (!launch || !sizes) return NOT_FOUND;
    *function = new Function{name, (void (*)(const unsigned *, unsigned, unsigned, void **))launch, {}};
    for (auto size = sizes(); *size; size++) (*function)->sizes.push_back(*size);
    return SUCCESS;
}
API Status cuFuncGetAttribute(int *value, int attribute, Function *) {
    *value = 0;
    return attribute == 1 ? SUCCESS : INVALID_VALUE;
}
API Status cuFuncSetAttribute(Function *function, int attribute, int value) {
    if (attribute != 8 || value < 0 || value > 227 << 10) return INVALID_VALUE;
    function->shared_most = value;
    return SUCCESS;
}
API Status cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned block_y, unsigned block_z,
                          unsigned shared, Stream *stream, void **arguments, void **extra) {
    if (Status status = on(stream)) return status;
    bool fits = x && y && z && x < 1u << 31 && y <= 65535 && z <= 65535 && block && block <= 1024 && block_y == 1 && block_z == 1;
    if (!fits || (int)shared > function->shared_most || extra) return INVALID_VALUE;
    // They are read before the call returns.
    auto values = std::make_shared<std::vector<std::vector<char>>>();
    for (size_t i = 0; i < function->sizes.size(); i++) {
        auto value = (const char *)arguments[i];
        values->emplace_back(value, value + function->sizes[i]);
    }
    Device *device = current;
    stream->compute([=] {
        std::string fails = setting("STANDIN_FAILS", "");
        if (fails == function->name || fails == function->name + "@" + std::to_string(device->number)) {
            device->failed = ILLEGAL_ADDRESS;
            return;
        }
        unsigned grid[] = {x, y, z};
        std::vector<void *> addresses;
        for (auto &value : *values) addresses.push_back(value.data());
        function->launch(grid, block, shared, addresses.data());
    });
    return SUCCESS;
}
API Status cuStreamBeginCapture_v2(Stream *stream, int mode) {
    if (Status status = on(stream)) return status;
    // THREAD_LOCAL.
    if (mode != 1 || stream->capture || begun) return INVALID_VALUE;
    begun = stream->capture = new Graph;
    begun->origin = stream;
    begun->streams.insert(stream);
    return SUCCESS;
}
API Status cuStreamIsCapturing(Stream *stream, int *status) {
    *status = !stream->capture ? 0 : stream->capture->failed ? 2 : 1;
    return context();
}
API Status cuStreamEndCapture(Stream *stream, Graph **graph) {
    Graph *captured = stream->capture;
    *graph = nullptr;
    if (!captured || captured->origin != stream || captured != begun) return CAPTURE_UNMATCHED;
    for (Stream *other : captured->streams) other->capture = nullptr;
    begun = nullptr;
    if (captured->failed) return captured->failed;
    *graph = captured;
    return SUCCESS;
}
API Status cuGraphInstantiateWithFlags(Graph **exec, Graph *graph, unsigned long long flags) {
    if (flags) return INVALID_VALUE;
    *exec = new Graph(*graph);
    return SUCCESS;
}
API Status cuGraphDestroy(Graph *graph) {
    delete graph;
    return SUCCESS;
}
API Status cuGraphExecDestroy(Graph *exec) {
    delete exec;
    return SUCCESS;
}
API Status cuGraphLaunch(Graph *exec, Stream *stream) {
    if (Status status = on(stream)) return status;
    for (const Node &node : exec->nodes) {
        if (!node.marked) {
            stream->put(node.run);
            continue;
        }
        auto mark = node.marked->renewed();
        stream->put([mark] { mark->pass(); });
    }
    return SUCCESS;
}
