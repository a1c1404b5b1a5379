// Collectives: ranks meet in a folder.

#include "numbers.h"
#include "standin.h"
#include <fstream>
#include <sys/stat.h>
#include <unistd.h>

namespace {

enum : Status { NCCL_INTERNAL = 3, NCCL_INVALID = 4, NCCL_IN_PROGRESS = 7 };

// Where ranks meet, in one process or several: a folder, and files in it that appear whole.
struct Meeting {
    std::string folder;
    std::atomic<bool> over{false};

    std::string path(const std::string &name) const { return folder + "/" + name; }
    bool has(const std::string &name) const { return access(path(name).c_str(), R_OK) == 0; }
    bool is_over() { return over || (over = has("over")); }

    void write(const std::string &name, const char *data, size_t bytes) {
        static std::atomic<int> number{0};
        std::string own = path("part-" + std::to_string(getpid()) + "-" + std::to_string(number++));
        std::ofstream(own, std::ios::binary).write(data, bytes);
        rename(own.c_str(), path(name).c_str());
    }
    // Once it is there; nothing when the meeting is over.
    std::vector<char> read(const std::string &name) {
        while (!has(name)) {
            if (is_over()) return {};
            usleep(50);
        }
        std::ifstream file(path(name), std::ios::binary);
        return {std::istreambuf_iterator<char>(file), {}};
    }
    // What all ranks give to an exchange, by rank; nothing when the meeting is over.
    std::vector<std::vector<char>> exchange(long number, int rank, int size, const void *data, size_t bytes) {
        auto name = [](long number, int rank) { return std::to_string(number) + "-of-" + std::to_string(rank); };
        write(name(number, rank), (const char *)data, bytes);
        std::vector<std::vector<char>> all;
        for (int other = 0; other < size; other++) all.push_back(read(name(number, other)));
        // Who came here has read all of the exchange before.
        unlink(path(name(number - 1, rank)).c_str());
        if (is_over()) all.clear();
        return all;
    }
};

} // namespace

struct Id {
    char bytes[128];
};
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};
struct Comm {
    std::shared_ptr<Meeting> meeting;
    Device *device;
    int rank, size;
    // Exchanges, and what went to and came from each rank.
    long next = 0;
    std::map<int, long> sent, received;
    bool is_there = false;
    // What a group asked for is only put on its stream when the state is asked for a second time, as the library may still be at it.
    std::vector<Task> pending;
    int polls = 0;
};

static thread_local int group_depth = 0;
struct Call {
    Comm *comm;
    Task task;
    bool sends;
};
static thread_local std::vector<Call> group;

API Status ncclGetVersion(int *version) {
    *version = 22703;
    return 0;
}
API Status ncclGetUniqueId(Id *id) {
    static std::atomic<int> number{0};
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "meeting-%d-%d-%.0f", getpid(), number++, 1e9 * now());
    return 0;
}
API Status ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, Config *config) {
    if (config->magic != 0xcafebeef || config->size < 48 || config->blocking != 0 || rank >= size || !current) return NCCL_INVALID;
    auto meeting = std::make_shared<Meeting>();
    meeting->folder = setting("STANDIN_MEETINGS", "/tmp") + "/" + id.bytes;
    mkdir(meeting->folder.c_str(), 0700);
    meeting->write("rank-" + std::to_string(rank), "", 0);
    *comm = new Comm;
    (*comm)->meeting = meeting, (*comm)->device = current, (*comm)->rank = rank, (*comm)->size = size;
    return NCCL_IN_PROGRESS;
}
API Status ncclCommGetAsyncError(Comm *comm, Status *state) {
    if (!comm->is_there) {
        comm->is_there = true;
        for (int other = 0; other < comm->size; other++) comm->is_there &= comm->meeting->has("rank-" + std::to_string(other));
    }
    if (comm->meeting->is_over()) {
        *state = NCCL_INTERNAL;
    } else if (!comm->is_there || (!comm->pending.empty() && comm->polls++ == 0)) {
        *state = NCCL_IN_PROGRESS;
    } else {
        for (Task &task : comm->pending) task();
        comm->pending.clear();
        comm->polls = 0;
        *state = 0;
    }
    return 0;
}
API const char *ncclGetErrorString(Status status) { return status == 6 ? "remote process exited" : "internal error of the stand-in"; }
API const char *ncclGetLastError(Comm *) { return ""; }
API Status ncclCommFinalize(Comm *) { return 0; }
API Status ncclCommDestroy(Comm *comm) {
    delete comm;
    return 0;
}
API Status ncclCommAbort(Comm *comm) {
    comm->meeting->write("over", "", 0);
    delete comm;
    return 0;
}
API Status ncclGroupStart() {
    group_depth++;
    return 0;
}
API Status ncclGroupEnd() {
    if (--group_depth) return group_depth < 0 ? NCCL_INVALID : 0;
    // All at once: nobody's receiving waits for his own sending.
    for (bool sends : {true, false})
        for (auto &call : group)
            if (call.sends == sends) call.comm->pending.push_back(std::move(call.task));
    bool any = !group.empty();
    group.clear();
    return any ? NCCL_IN_PROGRESS : 0;
}

// A call in a group: `work` runs on the stream.
static Status ask(Comm *comm, Stream *stream, Task work, bool sends = false) {
    if (!group_depth || stream->device != comm->device || !comm->pending.empty()) return NCCL_INVALID;
    group.push_back({comm, [stream, work] { stream->compute(work); }, sends});
    return 0;
}
static int nccl_type(int type) { return type == 9 ? BF16 : F32; }
static size_t nccl_size(int type) { return type == 0 ? 1 : size_of(nccl_type(type)); }
static void add(void *to, const std::vector<std::vector<char>> &all, size_t from, size_t count, int type) {
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (auto &part : all) sum += load(part.data(), type, from + i);
        store(to, type, i, sum);
    }
}

// The next one of a communicator: it takes what this rank gives, and has what all gave.
static std::function<std::vector<std::vector<char>>(const void *, size_t)> exchange_of(Comm *comm) {
    auto meeting = comm->meeting;
    long number = comm->next++;
    int rank = comm->rank, size = comm->size;
    return [=](const void *data, size_t bytes) { return meeting->exchange(number, rank, size, data, bytes); };
}

API Status ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Comm *comm, Stream *stream) {
    if (operation || !comm->device->holds((Address)to, count * nccl_size(type))) return NCCL_INVALID;
    auto exchange = exchange_of(comm);
    return ask(comm, stream, [=] {
        auto all = exchange(from, count * nccl_size(type));
        if (!all.empty()) add(to, all, 0, count, nccl_type(type));
    });
}
API Status ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Comm *comm, Stream *stream) {
    size_t whole = comm->size * count;
    if (operation || !comm->device->holds((Address)from, whole * nccl_size(type))) return NCCL_INVALID;
    auto exchange = exchange_of(comm);
    int rank = comm->rank;
    return ask(comm, stream, [=] {
        auto all = exchange(from, whole * nccl_size(type));
        if (!all.empty()) add(to, all, rank * count, count, nccl_type(type));
    });
}
API Status ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, Stream *stream) {
    size_t bytes = count * nccl_size(type);
    if (!comm->device->holds((Address)to, comm->size * bytes)) return NCCL_INVALID;
    auto exchange = exchange_of(comm);
    return ask(comm, stream, [=] {
        auto all = exchange(from, bytes);
        for (size_t other = 0; other < all.size(); other++) memcpy((char *)to + other * bytes, all[other].data(), bytes);
    });
}
API Status ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, Stream *stream) {
    size_t bytes = count * nccl_size(type);
    auto exchange = exchange_of(comm);
    int rank = comm->rank;
    return ask(comm, stream, [=] {
        auto all = exchange(from, rank == root ? bytes : 0);
        if (!all.empty()) memcpy(to, all[root].data(), bytes);
    });
}
static std::string between(int from, int to, long number) {
    return "from-" + std::to_string(from) + "-to-" + std::to_string(to) + "-" + std::to_string(number);
}
API Status ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, Stream *stream) {
    auto meeting = comm->meeting;
    std::string name = between(comm->rank, peer, comm->sent[peer]++);
    return ask(comm, stream, [=] { meeting->write(name, (const char *)from, count * nccl_size(type)); }, true);
}
API Status ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, Stream *stream) {
    auto meeting = comm->meeting;
    std::string name = between(peer, comm->rank, comm->received[peer]++);
    return ask(comm, stream, [=] {
        auto data = meeting->read(name);
        if (data.size() == count * nccl_size(type)) memcpy(to, data.data(), data.size());
        unlink(meeting->path(name).c_str());
    });
}
