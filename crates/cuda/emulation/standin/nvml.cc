// NVML: what a monitor reads of a GPU. Figures are made up but for the memory, which is that of the stand-in's GPUs in this process.
// STANDIN_SLOWED (0) is the mask of the reasons for a lower clock; with one, the clock is 1200 of 1980 MHz.

#include "standin.h"

namespace {
constexpr Status NVML_INVALID_ARGUMENT = 2;

struct Memory {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct Rates {
    unsigned gpu, memory;
};

unsigned long long slowed() { return strtoull(setting("STANDIN_SLOWED", "0").c_str(), nullptr, 0); }
size_t count() { return strtoull(setting("STANDIN_GPUS", "1").c_str(), nullptr, 10); }
size_t index(void *device) { return reinterpret_cast<size_t>(device) - 1; }
}  // namespace

API Status nvmlInit_v2() { return SUCCESS; }
API Status nvmlShutdown() { return SUCCESS; }
API Status nvmlDeviceGetCount_v2(unsigned *number) {
    *number = count();
    return SUCCESS;
}
API Status nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) {
    if (number >= count()) return NVML_INVALID_ARGUMENT;
    *device = reinterpret_cast<void *>(size_t(number) + 1);
    return SUCCESS;
}
API Status nvmlDeviceGetName(void *, char *name, unsigned length) {
    snprintf(name, length, "Stand-in");
    return SUCCESS;
}
API Status nvmlDeviceGetUtilizationRates(void *, Rates *rates) {
    *rates = {87, 40};
    return SUCCESS;
}
API Status nvmlDeviceGetMemoryInfo_v2(void *, Memory *memory) {
    unsigned long long total = strtoull(setting("STANDIN_MEMORY", "1073741824").c_str(), nullptr, 10);
    memory->total = total;
    memory->used = total / 4;
    memory->free = total - memory->used;
    return SUCCESS;
}
API Status nvmlDeviceGetTemperature(void *device, int, unsigned *degrees) {
    *degrees = 60 + index(device);
    return SUCCESS;
}
API Status nvmlDeviceGetPowerUsage(void *, unsigned *milliwatts) {
    *milliwatts = 512500;
    return SUCCESS;
}
API Status nvmlDeviceGetEnforcedPowerLimit(void *, unsigned *milliwatts) {
    *milliwatts = 700000;
    return SUCCESS;
}
API Status nvmlDeviceGetClockInfo(void *, int, unsigned *mhz) {
    *mhz = slowed() ? 1200 : 1980;
    return SUCCESS;
}
API Status nvmlDeviceGetMaxClockInfo(void *, int, unsigned *mhz) {
    *mhz = 1980;
    return SUCCESS;
}
API Status nvmlDeviceGetCurrentClocksThrottleReasons(void *, unsigned long long *reasons) {
    *reasons = slowed();
    return SUCCESS;
}
