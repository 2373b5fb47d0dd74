/* Loaded before the C library by the crash tests: counts what a process does to the files below $CRASH_DIR and, at the
 * $CRASH_AT-th such operation, does what $CRASH_HOW says:
 *
 *   kill    the process dies by SIGKILL before it
 *   torn    as kill, but half of a write is done first
 *   ENOSPC  it fails for want of room, and so does everything after it that grows a file or a folder
 *   EDQUOT  as ENOSPC, for the user's quota is used up
 *   EIO     it fails once
 *
 * Operations are creat, write, fsync, mkdir, and for deaths also rename, unlink, rmdir. Each is logged to $CRASH_LOG.
 *
 * With $CRASH_HOW = journal nothing happens to the process: what it did is written to $CRASH_LOG, for a test to work out what
 * a power loss could have left on the disk. A record is a line "WHAT\tOFFSET\tBYTES\tPATH\tTARGET\n", then so many bytes
 * of data. */
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
    if (!how || !strcmp(how, "journal") || !is_inside(path)) return 0;
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
    if (!strcmp(how, "EDQUOT")) return fatal && number >= fatal ? EDQUOT : 0;
    if (number != fatal) return 0;
    if (!strcmp(how, "EIO")) return EIO;
    if (!strcmp(how, "torn") && !strcmp(what, "write")) return -1;
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int keeps_journal(const char *path) {
    const char *how = getenv("CRASH_HOW");
    return how && !strcmp(how, "journal") && is_inside(path);
}

/* Appends a record in one write, so that those of several threads do not mix. */
static void journal(const char *what, const char *path, const char *target, long offset, const void *bytes, size_t count) {
    if (!keeps_journal(path)) return;
    int error = errno;
    char *record = malloc(count + 9000);
    int length = snprintf(record, 9000, "%s\t%ld\t%zu\t%s\t%s\n", what, offset, count, path, target);
    if (count) memcpy(record + length, bytes, count);
    int file = syscall(SYS_openat, AT_FDCWD, getenv("CRASH_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0644);
    syscall(SYS_write, file, record, length + count);
    syscall(SYS_close, file);
    free(record);
    errno = error;
}

/* Passes a call's result on and journals it if it succeeded. */
static int done(int result, const char *what, const char *path, const char *target) {
    if (result >= 0) journal(what, path, target, 0, NULL, 0);
    return result;
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
    int there = keeps_journal(path) && !access(path, F_OK);
    int file = NEXT(open)(path, flags, mode);
    if (flags & O_CREAT && !there) done(file, "creat", path, "");
    if (flags & O_TRUNC && there) done(file, "cut", path, "");
    return file;
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    int error = opened(path, flags);
    if (error) FAIL(error);
    int there = keeps_journal(path) && !access(path, F_OK);
    int file = NEXT(open64)(path, flags, mode);
    if (flags & O_CREAT && !there) done(file, "creat", path, "");
    if (flags & O_TRUNC && there) done(file, "cut", path, "");
    return file;
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
    ssize_t written = syscall(SYS_write, fd, bytes, count);
    if (written > 0) journal("write", path, "", lseek(fd, 0, SEEK_CUR) - written, bytes, written);
    return written;
}

#define ON_FD(name, label) \
    int name(int fd) { \
        char path[4096]; \
        path_of(fd, NULL, path, sizeof path); \
        int error = meets(label, path, 1); \
        if (error) FAIL(error); \
        return done(NEXT(name)(fd), label, path, ""); \
    }
ON_FD(fsync, "fsync")
ON_FD(fdatasync, "fsync")

int mkdir(const char *path, mode_t mode) {
    int error = meets("mkdir", path, 1);
    if (error) FAIL(error);
    return done(NEXT(mkdir)(path, mode), "mkdir", path, "");
}

int rename(const char *from, const char *to) {
    meets("rename", to, 0);
    return done(NEXT(rename)(from, to), "rename", from, to);
}

int unlink(const char *path) {
    meets("unlink", path, 0);
    return done(NEXT(unlink)(path), "unlink", path, "");
}

int rmdir(const char *path) {
    meets("rmdir", path, 0);
    return done(NEXT(rmdir)(path), "unlink", path, "");
}

int unlinkat(int dir, const char *name, int flags) {
    char path[4096];
    path_of(dir, name, path, sizeof path);
    meets("unlink", path, 0);
    return done(NEXT(unlinkat)(dir, name, flags), "unlink", path, "");
}

int ftruncate64(int fd, off64_t length) {
    char path[4096];
    path_of(fd, NULL, path, sizeof path);
    int result = NEXT(ftruncate64)(fd, length);
    if (!result) journal("cut", path, "", length, NULL, 0);
    return result;
}
