// NCCL between processes (or threads) with a GPU of the stand-in each: bytes go over Unix sockets. It is late like the streams, and later: a group is
// put on its stream only after ncclGroupEnd has returned, what it sends is read as soon as the stream comes to it, and what it receives is written some
// milliseconds later. So who does not wait for the launch, the stream before, or the stream after, has wrong numbers. Only what crates/comm/src/nccl
// calls is here; signatures are those of nccl.h.
#include "worker.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace {

enum Result { OK = 0, SYSTEM = 2, ARGUMENT = 4, USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
constexpr int MISMATCH = 719; // CUDA_ERROR_LAUNCH_FAILED
using std::chrono::milliseconds;

struct Id {
    char text[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

struct Ranks {
    int rank, size, device, listener = -1;
    Id id;
    std::vector<int> sockets;
    std::atomic<int> state{IN_PROGRESS};
    std::atomic<bool> stop{false};

    ~Ranks() {
        for (int socket : sockets)
            if (socket >= 0) close(socket);
        if (listener >= 0) close(listener);
    }
};

// What a communicator's handle points to. Work on a stream keeps the ranks.
struct Comm {
    std::shared_ptr<Ranks> ranks;
    std::thread worker;
    void join() {
        if (worker.joinable()) worker.join();
    }
};

struct Piece {
    bool sends;
    int peer;
    uint64_t address;
    size_t bytes;
};

struct Group {
    Comm *comm = nullptr;
    void *stream = nullptr;
    std::vector<Piece> pieces;
};

thread_local Group group;

socklen_t address(const Ranks &ranks, int rank, sockaddr_un &out) {
    std::memset(&out, 0, sizeof out);
    out.sun_family = AF_UNIX;
    int length = std::snprintf(out.sun_path + 1, sizeof out.sun_path - 1, "%s-%d", ranks.id.text, rank);
    return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + size_t(length));
}

struct Greeting {
    int rank, device;
};

// Every rank connects to those before it; both say who they are, and which GPU they use.
void gather(Ranks &ranks) {
    bool twice = false;
    auto greet = [&](int socket) -> int {
        Greeting own{ranks.rank, ranks.device}, other{};
        if (send(socket, &own, sizeof own, MSG_NOSIGNAL) != sizeof own || recv(socket, &other, sizeof other, MSG_WAITALL) != sizeof other) return -1;
        ranks.sockets[size_t(other.rank)] = socket;
        twice |= other.device == ranks.device;
        return other.rank;
    };
    for (int peer = 0; peer < ranks.rank;) {
        if (ranks.stop) return;
        sockaddr_un name;
        socklen_t length = address(ranks, peer, name);
        int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(made, reinterpret_cast<sockaddr *>(&name), length) == 0 && greet(made) >= 0) {
            peer++;
            continue;
        }
        close(made);
        usleep(1000);
    }
    for (int missing = ranks.size - 1 - ranks.rank; missing > 0;) {
        pollfd wait{ranks.listener, POLLIN, 0};
        if (ranks.stop) return;
        if (poll(&wait, 1, 5) <= 0) continue;
        int made = accept4(ranks.listener, nullptr, nullptr, SOCK_CLOEXEC);
        if (made < 0) continue;
        if (greet(made) < 0) close(made);
        else missing--;
    }
    for (int socket : ranks.sockets)
        if (socket >= 0) fcntl(socket, F_SETFL, O_NONBLOCK);
    ranks.state = twice ? USAGE : OK;
}

// Sends and receives all pieces of a group. Whether it did: not if a peer is gone, or after an abort.
bool exchange(Ranks &ranks, const std::vector<std::vector<char>> &out, std::vector<std::vector<char>> &in) {
    std::vector<size_t> sent(out.size()), received(in.size());
    for (;;) {
        std::vector<pollfd> wait;
        std::vector<size_t> peers;
        for (size_t peer = 0; peer < out.size(); peer++) {
            short events = short((sent[peer] < out[peer].size() ? POLLOUT : 0) | (received[peer] < in[peer].size() ? POLLIN : 0));
            if (!events) continue;
            wait.push_back({ranks.sockets[peer], events, 0});
            peers.push_back(peer);
        }
        if (wait.empty()) return true;
        if (ranks.stop) return false;
        if (poll(wait.data(), nfds_t(wait.size()), 5) <= 0) continue;
        for (size_t at = 0; at < wait.size(); at++) {
            size_t peer = peers[at];
            auto move = [&](bool reading, size_t &done, size_t all, char *data) {
                if (done == all || !(wait[at].revents & (reading ? POLLIN | POLLHUP | POLLERR : POLLOUT | POLLERR))) return true;
                ssize_t moved = reading ? recv(wait[at].fd, data + done, all - done, 0) : send(wait[at].fd, data + done, all - done, MSG_NOSIGNAL);
                if (moved > 0) done += size_t(moved);
                return moved > 0 || (moved < 0 && (errno == EAGAIN || errno == EINTR));
            };
            bool whole = move(false, sent[peer], out[peer].size(), const_cast<char *>(out[peer].data())) &&
                         move(true, received[peer], in[peer].size(), in[peer].data());
            if (!whole) {
                ranks.state = REMOTE;
                // As NCCL's kernels, which end when the communicator is aborted.
                while (!ranks.stop) usleep(1000);
                return false;
            }
        }
    }
}

// How long after their arrival numbers are written.
milliseconds late() {
    const char *text = std::getenv("TUNESMITH_STAND_IN_LATE");
    return milliseconds(text && *text ? std::atoi(text) : 2);
}

int perform(Ranks &ranks, const std::vector<Piece> &pieces) {
    if (ranks.stop) return 0;
    for (const Piece &piece : pieces)
        if (int error = tunesmith_stand_in_check(piece.sends ? "ncclSend" : "ncclRecv", piece.address, piece.bytes)) return error;
    std::vector<std::vector<char>> out(size_t(ranks.size)), in(size_t(ranks.size));
    for (const Piece &piece : pieces) {
        const char *data = reinterpret_cast<const char *>(piece.address);
        std::vector<char> &line = (piece.sends ? out : in)[size_t(piece.peer)];
        // Its length goes before it: each send meets a receive of its size.
        const char *length = reinterpret_cast<const char *>(&piece.bytes);
        if (piece.sends) {
            line.insert(line.end(), length, length + sizeof piece.bytes);
            line.insert(line.end(), data, data + piece.bytes);
        } else {
            line.resize(line.size() + sizeof piece.bytes + piece.bytes);
        }
    }
    if (!exchange(ranks, out, in)) return 0;
    std::this_thread::sleep_for(late());
    std::vector<size_t> taken(size_t(ranks.size));
    for (const Piece &piece : pieces) {
        if (piece.sends) continue;
        if (int error = tunesmith_stand_in_check("ncclRecv", piece.address, piece.bytes)) return error;
        size_t &at = taken[size_t(piece.peer)], sent;
        std::memcpy(&sent, in[size_t(piece.peer)].data() + at, sizeof sent);
        at += sizeof sent;
        if (sent != piece.bytes) {
            std::fprintf(stderr, "stand-in: ncclRecv of %zu bytes meets ncclSend of %zu from rank %d\n", piece.bytes, sent, piece.peer);
            return MISMATCH;
        }
        std::memcpy(reinterpret_cast<char *>(piece.address), in[size_t(piece.peer)].data() + at, piece.bytes);
        at += piece.bytes;
    }
    return 0;
}

int ask(Comm *comm, bool sends, int peer, const void *at, size_t bytes, int type, void *stream) {
    if (type != 1 || !stream || peer < 0 || peer >= comm->ranks->size || peer == comm->ranks->rank) return ARGUMENT;
    if (group.comm && group.comm != comm) return USAGE;
    group.comm = comm;
    group.stream = stream;
    group.pieces.push_back({sends, peer, reinterpret_cast<uint64_t>(at), bytes});
    return OK;
}

} // namespace

extern "C" {

const char *ncclGetErrorString(int code) {
    return code == REMOTE ? "remote process exited" : code == SYSTEM ? "system error" : code == USAGE ? "invalid usage" : "stand-in error";
}

int ncclGetVersion(int *version) {
    *version = 22705;
    return OK;
}

int ncclGetUniqueId(Id *id) {
    static std::atomic<int> made;
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->text, sizeof id->text, "tunesmith-nccl-%d-%d", int(getpid()), made++);
    return OK;
}

int ncclCommInitRankConfig(Comm **out, int size, Id id, int rank, Config *config) {
    if (config->magic != 0xcafebeef || config->blocking != 0 || config->size < sizeof *config) return ARGUMENT;
    auto ranks = std::make_shared<Ranks>();
    ranks->rank = rank;
    ranks->size = size;
    ranks->id = id;
    ranks->device = tunesmith_stand_in_device();
    ranks->sockets.assign(size_t(size), -1);
    ranks->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un name;
    socklen_t length = address(*ranks, rank, name);
    if (ranks->device < 0) return USAGE;
    if (bind(ranks->listener, reinterpret_cast<sockaddr *>(&name), length) || listen(ranks->listener, size)) return SYSTEM;
    *out = new Comm{ranks, std::thread([ranks] { gather(*ranks); })};
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
    *state = comm->ranks->state;
    return OK;
}

int ncclGroupStart() {
    group = Group();
    return OK;
}

int ncclSend(const void *from, size_t bytes, int type, int peer, Comm *comm, void *stream) { return ask(comm, true, peer, from, bytes, type, stream); }

int ncclRecv(void *to, size_t bytes, int type, int peer, Comm *comm, void *stream) { return ask(comm, false, peer, to, bytes, type, stream); }

int ncclBroadcast(const void *from, void *to, size_t bytes, int type, int root, Comm *comm, void *stream) {
    if (comm->ranks->rank != root) return ask(comm, false, root, to, bytes, type, stream);
    for (int peer = 0; peer < comm->ranks->size; peer++)
        if (int code = peer == root ? OK : ask(comm, true, peer, from, bytes, type, stream)) return code;
    return OK;
}

int ncclAllGather(const void *from, void *to, size_t bytes, int type, Comm *comm, void *stream) {
    char *all = static_cast<char *>(to);
    if (from != all + size_t(comm->ranks->rank) * bytes) return ARGUMENT; // in place
    for (int peer = 0; peer < comm->ranks->size; peer++) {
        if (peer == comm->ranks->rank) continue;
        if (int code = ask(comm, true, peer, from, bytes, type, stream)) return code;
        if (int code = ask(comm, false, peer, all + size_t(peer) * bytes, bytes, type, stream)) return code;
    }
    return OK;
}

int ncclGroupEnd() {
    Group asked = std::move(group);
    group = Group();
    if (!asked.comm) return OK;
    Comm *comm = asked.comm;
    if (comm->ranks->state != OK) return ARGUMENT;
    comm->join();
    comm->ranks->state = IN_PROGRESS;
    comm->worker = std::thread([ranks = comm->ranks, asked] {
        usleep(200);
        std::function<int()> work = [ranks, pieces = asked.pieces] { return perform(*ranks, pieces); };
        tunesmith_stand_in_enqueue(asked.stream, &work);
        int before = IN_PROGRESS; // a peer may be gone already
        ranks->state.compare_exchange_strong(before, OK);
    });
    return IN_PROGRESS;
}

int ncclCommFinalize(Comm *) { return OK; }

int ncclCommAbort(Comm *comm) {
    comm->ranks->stop = true;
    comm->join();
    delete comm;
    return OK;
}

int ncclCommDestroy(Comm *comm) { return ncclCommAbort(comm); }

} // extern "C"
