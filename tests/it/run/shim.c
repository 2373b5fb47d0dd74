/* Loaded before the C library by the crash tests: counts what a process does to the files below $CRASH_DIR and, at the
 * $CRASH_AT-th such operation, does what $CRASH_HOW says:
 *
 *   kill    the process dies by SIGKILL before it
 *   torn    as kill, but half of a write is done first
 *   ENOSPC  it fails for want of room, and so does everything after it that grows a file or a folder
 *   EIO     it fails once
 *
 * Operations are creat, write, fsync, mkdir, and for deaths also rename, unlink, rmdir. Each is logged to $CRASH_LOG. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static long counter;

static int is_inside(const char *path) {
    const char *dir = getenv("CRASH_DIR");
    size_t length = dir ? strlen(dir) : 0;
    return length && path && !strncmp(path, dir, length) && (path[length] == '/' || path[length] == 0);
}

static void path_of(int fd, const char *name, char *out, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, size - 1);
    if (length < 0) length = 0;
    out[length] = 0;
    if (name && name[0] == '/') length = 0;
    if (name) snprintf(out + length, size - length, name[0] == '/' ? "%s" : "/%s", name);
}

/* Counts an operation. Returns the error to fail with, -1 to die in the middle of it, or 0. */
static int meets(const char *what, const char *path, int grows) {
    const char *how = getenv("CRASH_HOW"), *at = getenv("CRASH_AT"), *log = getenv("CRASH_LOG");
    if (!how || !is_inside(path)) return 0;
    int dies = !strcmp(how, "kill") || !strcmp(how, "torn");
    if (!dies && !grows) return 0;
    long number = __sync_add_and_fetch(&counter, 1), fatal = at ? atol(at) : 0;
    if (log) {
        char line[4200];
        int length = snprintf(line, sizeof line, "%ld %s %s\n", number, what, path);
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT, 0644);
        syscall(SYS_write, file, line, length);
        syscall(SYS_close, file);
    }
    if (!strcmp(how, "ENOSPC")) return fatal && number >= fatal ? ENOSPC : 0;
    if (number != fatal) return 0;
    if (!strcmp(how, "EIO")) return EIO;
    if (!strcmp(how, "torn") && !strcmp(what, "write")) return -1;
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(error) do { errno = (error); return -1; } while (0)

static int opened(const char *path, int flags) {
    return (flags & O_CREAT) && is_inside(path) ? meets("creat", path, 1) : 0;
}

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    int error = opened(path, flags);
    if (error) FAIL(error);
    return NEXT(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    int error = opened(path, flags);
    if (error) FAIL(error);
    return NEXT(open64)(path, flags, mode);
}

ssize_t write(int fd, const void *bytes, size_t count) {
    char path[4096];
    path_of(fd, NULL, path, sizeof path);
    int error = meets("write", path, 1);
    if (error > 0) FAIL(error);
    if (error < 0) {
        syscall(SYS_write, fd, bytes, count / 2);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    return syscall(SYS_write, fd, bytes, count);
}

#define ON_FD(name, label) \
    int name(int fd) { \
        char path[4096]; \
        path_of(fd, NULL, path, sizeof path); \
        int error = meets(label, path, 1); \
        if (error) FAIL(error); \
        return NEXT(name)(fd); \
    }
ON_FD(fsync, "fsync")
ON_FD(fdatasync, "fsync")

int mkdir(const char *path, mode_t mode) {
    int error = meets("mkdir", path, 1);
    if (error) FAIL(error);
    return NEXT(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    meets("rename", to, 0);
    return NEXT(rename)(from, to);
}

int unlink(const char *path) {
    meets("unlink", path, 0);
    return NEXT(unlink)(path);
}

int rmdir(const char *path) {
    meets("rmdir", path, 0);
    return NEXT(rmdir)(path);
}

int unlinkat(int dir, const char *name, int flags) {
    char path[4096];
    path_of(dir, name, path, sizeof path);
    meets("unlink", path, 0);
    return NEXT(unlinkat)(dir, name, flags);
}
