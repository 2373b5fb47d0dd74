/* A stand-in for the NVIDIA driver and for NCCL, for tests on machines without a GPU: "GPU memory" is main memory, ranks (threads or
 * processes) talk over Unix sockets. Work is done by a thread of its own after ncclGroupEnd has returned, so that who does not wait
 * for the stream reads what is not there yet. Only what crates/comm/src/nccl calls is here; signatures are those of cuda.h and nccl.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* ---- the driver ---- */
enum { CUDA_OK = 0, CUDA_NOT_READY = 600 };
typedef struct { atomic_int pending; } Stream;

int cuInit(unsigned flags) { return CUDA_OK; }
int cuDeviceGetCount(int *count) {
    const char *wanted = getenv("FAKE_GPUS");
    *count = wanted ? atoi(wanted) : 4;
    return CUDA_OK;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return CUDA_OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return CUDA_OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return CUDA_OK; }
int cuCtxSetCurrent(void *context) { return CUDA_OK; }
int cuStreamCreate(Stream **stream, unsigned flags) { *stream = calloc(1, sizeof **stream); return CUDA_OK; }
int cuStreamQuery(Stream *stream) { return atomic_load(&stream->pending) ? CUDA_NOT_READY : CUDA_OK; }
int cuStreamDestroy_v2(Stream *stream) { free(stream); return CUDA_OK; }
int cuMemAlloc_v2(uint64_t *at, size_t bytes) { *at = (uint64_t)malloc(bytes); return *at ? CUDA_OK : 2; }
int cuMemFree_v2(uint64_t at) { free((void *)at); return CUDA_OK; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, Stream *stream) { memcpy((void *)to, from, bytes); return CUDA_OK; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)from, bytes); return CUDA_OK; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_FAKE"; return CUDA_OK; }
int cuGetErrorString(int code, const char **text) { *text = "the stand-in failed"; return CUDA_OK; }

/* ---- NCCL ---- */
enum { OK = 0, SYSTEM = 2, ARGUMENT = 4, REMOTE = 6, IN_PROGRESS = 7 };
enum { MOST_RANKS = 16, MOST_PIECES = 64 };
typedef struct { char text[128]; } Id;
typedef struct { char *at; size_t left; } Piece;
typedef struct { Piece pieces[MOST_PIECES]; int first, count; } Line;
typedef struct {
    int rank, size, listener, sockets[MOST_RANKS];
    Id id;
    atomic_int state, stop;
    pthread_t thread;
    int running;
    Line out[MOST_RANKS], in[MOST_RANKS];
    Stream *stream;
} Comm;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;

static _Thread_local Comm *grouped;

const char *ncclGetErrorString(int code) { return code == REMOTE ? "remote process exited" : code == SYSTEM ? "system error" : "stand-in error"; }
int ncclGetVersion(int *version) { *version = 22705; return OK; }
int ncclGetUniqueId(Id *id) {
    static atomic_int made;
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "tunesmith-fake-nccl-%d-%d", (int)getpid(), atomic_fetch_add(&made, 1));
    return OK;
}

static socklen_t address(const Comm *comm, int rank, struct sockaddr_un *out) {
    memset(out, 0, sizeof *out);
    out->sun_family = AF_UNIX;
    int length = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "%s-%d", comm->id.text, rank);
    return offsetof(struct sockaddr_un, sun_path) + 1 + length;
}

/* Every rank connects to those before it and says who it is. */
static void *gather(void *argument) {
    Comm *comm = argument;
    struct sockaddr_un name;
    for (int peer = 0; peer < comm->rank; peer++) {
        socklen_t length = address(comm, peer, &name);
        for (;;) {
            if (atomic_load(&comm->stop)) return NULL;
            int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
            if (connect(fd, (struct sockaddr *)&name, length) == 0) {
                if (write(fd, &comm->rank, sizeof comm->rank) != sizeof comm->rank) abort();
                comm->sockets[peer] = fd;
                break;
            }
            close(fd);
            usleep(1000);
        }
    }
    for (int missing = comm->size - 1 - comm->rank; missing > 0;) {
        struct pollfd wait = {comm->listener, POLLIN, 0};
        if (atomic_load(&comm->stop)) return NULL;
        if (poll(&wait, 1, 5) <= 0) continue;
        int fd = accept4(comm->listener, NULL, NULL, SOCK_CLOEXEC), peer;
        if (read(fd, &peer, sizeof peer) != sizeof peer) { close(fd); continue; }
        comm->sockets[peer] = fd;
        missing--;
    }
    for (int peer = 0; peer < comm->size; peer++)
        if (peer != comm->rank) fcntl(comm->sockets[peer], F_SETFL, O_NONBLOCK);
    atomic_store(&comm->state, OK);
    return NULL;
}

static void join(Comm *comm) {
    if (comm->running) pthread_join(comm->thread, NULL);
    comm->running = 0;
}

int ncclCommInitRankConfig(Comm **out, int size, Id id, int rank, Config *config) {
    if (config->magic != 0xcafebeef || config->blocking != 0 || config->size < sizeof *config || size > MOST_RANKS) return ARGUMENT;
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank, comm->size = size, comm->id = id;
    comm->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un name;
    socklen_t length = address(comm, rank, &name);
    if (bind(comm->listener, (struct sockaddr *)&name, length) || listen(comm->listener, MOST_RANKS)) return SYSTEM;
    atomic_store(&comm->state, IN_PROGRESS);
    comm->running = pthread_create(&comm->thread, NULL, gather, comm) == 0;
    *out = comm;
    return IN_PROGRESS;
}
int ncclCommGetAsyncError(Comm *comm, int *state) { *state = atomic_load(&comm->state); return OK; }

static void drop_done(Line *line) {
    while (line->first < line->count && line->pieces[line->first].left == 0) line->first++;
}

/* Moves what the group has asked for. */
static void *move(void *argument) {
    Comm *comm = argument;
    for (;;) {
        struct pollfd wait[MOST_RANKS];
        int open = 0;
        for (int peer = 0; peer < comm->size; peer++) {
            drop_done(&comm->out[peer]), drop_done(&comm->in[peer]);
            short events = (comm->out[peer].first < comm->out[peer].count ? POLLOUT : 0) | (comm->in[peer].first < comm->in[peer].count ? POLLIN : 0);
            wait[peer] = (struct pollfd){events ? comm->sockets[peer] : -1, events, 0};
            open += events != 0;
        }
        if (!open) break;
        if (atomic_load(&comm->stop)) return NULL;
        if (poll(wait, comm->size, 5) <= 0) continue;
        for (int peer = 0; peer < comm->size; peer++) {
            for (int reading = 0; reading < 2; reading++) {
                Line *line = reading ? &comm->in[peer] : &comm->out[peer];
                if (wait[peer].fd < 0 || line->first == line->count || !(wait[peer].revents & (reading ? POLLIN | POLLHUP : POLLOUT))) continue;
                Piece *piece = &line->pieces[line->first];
                ssize_t moved = reading ? read(wait[peer].fd, piece->at, piece->left) : send(wait[peer].fd, piece->at, piece->left, MSG_NOSIGNAL);
                if (moved > 0) piece->at += moved, piece->left -= moved;
                else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) { atomic_store(&comm->state, REMOTE); return NULL; }
            }
        }
    }
    usleep(200);
    for (int peer = 0; peer < comm->size; peer++) comm->out[peer].first = comm->out[peer].count = comm->in[peer].first = comm->in[peer].count = 0;
    atomic_store(&comm->stream->pending, 0);
    return NULL;
}

static int ask(Comm *comm, Line *line, void *at, size_t bytes, Stream *stream) {
    if (line->count == MOST_PIECES) return ARGUMENT;
    line->pieces[line->count++] = (Piece){at, bytes};
    comm->stream = stream;
    grouped = comm;
    return OK;
}
int ncclGroupStart(void) { grouped = NULL; return OK; }
int ncclSend(const void *from, size_t bytes, int type, int peer, Comm *comm, Stream *stream) { return ask(comm, &comm->out[peer], (void *)from, bytes, stream); }
int ncclRecv(void *to, size_t bytes, int type, int peer, Comm *comm, Stream *stream) { return ask(comm, &comm->in[peer], to, bytes, stream); }
int ncclBroadcast(const void *from, void *to, size_t bytes, int type, int root, Comm *comm, Stream *stream) {
    if (comm->rank != root) return ask(comm, &comm->in[root], to, bytes, stream);
    int code = OK;
    for (int peer = 0; peer < comm->size; peer++)
        if (peer != root) code |= ask(comm, &comm->out[peer], (void *)from, bytes, stream);
    return code;
}
int ncclGroupEnd(void) {
    Comm *comm = grouped;
    if (!comm) return OK;
    join(comm);
    atomic_store(&comm->stream->pending, 1);
    comm->running = pthread_create(&comm->thread, NULL, move, comm) == 0;
    return IN_PROGRESS;
}
int ncclCommFinalize(Comm *comm) { return OK; }
int ncclCommAbort(Comm *comm) {
    atomic_store(&comm->stop, 1);
    join(comm);
    for (int peer = 0; peer < comm->size; peer++)
        if (comm->sockets[peer] > 0) close(comm->sockets[peer]);
    close(comm->listener);
    free(comm);
    return OK;
}
int ncclCommDestroy(Comm *comm) { return ncclCommAbort(comm); }
