// A stand-in for NVIDIA's driver and libraries, so that the program itself runs in tests as it would on GPUs: the files of this folder make one shared object,
// which goes by the names libcuda.so.1, libnvrtc.so.12, libcublasLt.so.12 and libnccl.so.2. Memory is the host's, kernels are what the host's compiler makes of
// the same sources with ../cuda.h, every stream is a thread, products are loops, collectives exchange files.
//
// It has the functions that the program calls and no others, and is strict where the documentation is: what that forbids fails with the status that it names.
// Not here: time, and everything that a GPU does by itself.
//
// STANDIN_GPUS (1), STANDIN_DRIVER (12080), STANDIN_CAPABILITY (90) and STANDIN_MEMORY (bytes of a GPU) say what there is; a kernel whose name is STANDIN_FAILS
// (NAME, or NAME@GPU) ends as one does that reads where there is nothing. Kernels are compiled to STANDIN_FOLDER; ranks meet in STANDIN_MEETINGS.

#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <time.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

// What the compiler makes begins so, and goes on with the path of a shared object.
constexpr char IMAGE[] = "STANDIN ";

using Status = int;
using Address = unsigned long long;
using Task = std::function<void()>;

// Of cuda.h.
enum : Status {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
};

inline std::string setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

inline double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

struct Stream;
struct Event;

// A place in a stream that has been passed or has not.
struct Mark {
    std::mutex mutex;
    std::condition_variable changed;
    bool passed = false;
    double at = 0;

    void pass() {
        std::lock_guard<std::mutex> lock(mutex);
        passed = true, at = now();
        changed.notify_all();
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return passed; });
    }
    bool is_passed() {
        std::lock_guard<std::mutex> lock(mutex);
        return passed;
    }
};

struct Node {
    Task run;
    Event *marked;
};

struct Graph {
    std::vector<Node> nodes;
    std::set<Stream *> streams;
    Stream *origin;
    Status failed = SUCCESS;
};

struct Device {
    int number = 0;
    std::mutex mutex;
    std::map<Address, size_t> blocks;
    size_t used = 0, total = 0;
    std::vector<Stream *> streams;
    // What a kernel has done wrong: every call fails from then on.
    std::atomic<Status> failed{SUCCESS};

    bool holds(Address address, size_t bytes) {
        std::lock_guard<std::mutex> lock(mutex);
        auto block = blocks.upper_bound(address);
        if (block == blocks.begin()) return false;
        --block;
        return address + bytes <= block->first + block->second;
    }
};

struct Stream {
    Device *device;
    Graph *capture = nullptr;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Task> tasks;
    bool busy = false;

    explicit Stream(Device *device) : device(device) {
        std::thread([this] { work(); }).detach();
    }
    void work() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return !tasks.empty(); });
            Task task = std::move(tasks.front());
            tasks.pop_front();
            busy = true;
            lock.unlock();
            task();
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }
    void put(Task task) {
        std::lock_guard<std::mutex> lock(mutex);
        tasks.push_back(std::move(task));
        changed.notify_all();
    }
    // As a part of a graph while one is captured.
    void give(Task task) {
        if (capture)
            capture->nodes.push_back({std::move(task), nullptr});
        else
            put(std::move(task));
    }
    // Work of the device, which a failed one does no more.
    void compute(Task task) {
        Device *on = device;
        give([on, task] {
            if (on->failed == SUCCESS) task();
        });
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return tasks.empty() && !busy; });
    }
};

struct Event {
    Device *device;
    std::mutex mutex;
    std::shared_ptr<Mark> mark;
    Graph *captured = nullptr;

    std::shared_ptr<Mark> latest() {
        std::lock_guard<std::mutex> lock(mutex);
        return mark;
    }
    std::shared_ptr<Mark> renewed() {
        std::lock_guard<std::mutex> lock(mutex);
        captured = nullptr;
        return mark = std::make_shared<Mark>();
    }
};

inline std::vector<Device *> &devices() {
    static std::vector<Device *> all = [] {
        std::vector<Device *> all;
        for (int number = 0; number < atoi(setting("STANDIN_GPUS", "1").c_str()); number++) {
            all.push_back(new Device);
            all.back()->number = number;
            all.back()->total = strtoull(setting("STANDIN_MEMORY", "1073741824").c_str(), nullptr, 10);
        }
        return all;
    }();
    return all;
}

// The context of this thread.
inline thread_local Device *current = nullptr;

// What lets every call on the context of this thread fail.
inline Status context() {
    if (!current) return INVALID_CONTEXT;
    return current->failed;
}

inline Status on(Stream *stream) {
    if (Status status = context()) return status;
    return stream && stream->device == current ? SUCCESS : INVALID_HANDLE;
}
