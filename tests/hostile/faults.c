/* Makes chosen calls of a process fail. Loaded by LD_PRELOAD; `faults.py` arms it by ctypes.
 *
 * Only calls on files below one directory count, so that the interpreter's own are left alone; or
 * those on sockets, whose names in /proc begin with "socket:".
 * Counters are in shared memory: a parent reads what its fork has done. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { KILL = -1, TRUNCATE = -2, UNLINK = -3, REWRITE = -4 };

static struct state {
    int seen;
    int clock;
} *shared;
static char under[PATH_MAX], calls[1024];
static int at = -1, until = -1, action, jumps;

__attribute__((constructor)) static void begin(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) abort();
}

/* names: " write pwrite "; first to last (exclusive): which of these calls, counted from 0;
 * what: an errno, or what happens before the call. */
void fault_arm(const char *directory, const char *names, int first, int last, int what) {
    snprintf(under, sizeof under, "%s", directory);
    snprintf(calls, sizeof calls, "%s", names);
    at = first, until = last, action = what;
    shared->seen = 0;
}

void fault_jump(int seconds) { jumps = seconds; }

int fault_seen(void) { return shared->seen; }

static void rewrite(const char *path) {
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR);
    struct stat found;
    if (fd >= 0 && !fstat(fd, &found)) {
        char *all = mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (all != MAP_FAILED)
            for (off_t i = 0; i < found.st_size; i++) all[i] ^= 0x55;
    }
    if (fd >= 0) syscall(SYS_close, fd);
    struct timespec now[2] = {{.tv_nsec = UTIME_NOW}, {.tv_nsec = UTIME_NOW}};
    utimensat(AT_FDCWD, path, now, 0);
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return 1;
}

/* Return whether the call must fail; errno is set. */
static int fails(const char *name, int fd, const char *relative) {
    char path[PATH_MAX], wanted[64];
    int kept = errno;
    if (at < 0) return 0;
    snprintf(wanted, sizeof wanted, " %s ", name);
    if (!strstr(calls, wanted)) return 0;
    if (relative && relative[0] == '/')
        snprintf(path, sizeof path, "%s", relative);
    else if (!path_of(fd, path))
        return errno = kept, 0;
    errno = kept;
    if (strncmp(path, under, strlen(under))) return 0;
    int number = __atomic_fetch_add(&shared->seen, 1, __ATOMIC_SEQ_CST);
    if (number < at || number >= until) return 0;
    struct stat found;
    switch (action) {
        case KILL: raise(SIGKILL); break;
        case TRUNCATE: if (!stat(path, &found) && truncate(path, found.st_size / 2)) abort(); break;
        case UNLINK: unlink(path); break;
        case REWRITE: rewrite(path); break;
        default: return errno = action, 1;
    }
    return errno = kept, 0;
}

#define WRAP(type, name, label, fd, relative, parameters, ...)           \
    type name parameters {                                                \
        static type(*real) parameters;                                    \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name);    \
        if (fails(label, fd, relative)) return (type)-1;                  \
        return real(__VA_ARGS__);                                         \
    }

WRAP(ssize_t, write, "write", fd, NULL, (int fd, const void *data, size_t size), fd, data, size)
WRAP(ssize_t, pwrite, "pwrite", fd, NULL, (int fd, const void *data, size_t size, off_t to), fd, data, size, to)
WRAP(ssize_t, pwrite64, "pwrite", fd, NULL, (int fd, const void *data, size_t size, off64_t to), fd, data, size, to)
WRAP(ssize_t, copy_file_range, "copy_file_range", to, NULL,
     (int from, off64_t *start, int to, off64_t *into, size_t size, unsigned flags), from, start, to, into, size, flags)
WRAP(ssize_t, read, "read", fd, NULL, (int fd, void *data, size_t size), fd, data, size)
WRAP(ssize_t, pread, "read", fd, NULL, (int fd, void *data, size_t size, off_t from), fd, data, size, from)
WRAP(ssize_t, pread64, "read", fd, NULL, (int fd, void *data, size_t size, off64_t from), fd, data, size, from)
WRAP(ssize_t, preadv, "read", fd, NULL, (int fd, const struct iovec *all, int count, off_t from), fd, all, count, from)
WRAP(ssize_t, preadv64, "read", fd, NULL, (int fd, const struct iovec *all, int count, off64_t from), fd, all, count, from)
WRAP(ssize_t, preadv2, "read", fd, NULL, (int fd, const struct iovec *all, int count, off_t from, int flags), fd, all, count, from, flags)
WRAP(ssize_t, preadv64v2, "read", fd, NULL, (int fd, const struct iovec *all, int count, off64_t from, int flags), fd, all, count, from, flags)

/* A connection whose call failed is dead: the peer sees its end, too. */
#define CONNECTION(name, type)                                                              \
    ssize_t name(int fd, type data, size_t size, int flags) {                               \
        static ssize_t (*real)(int, type, size_t, int);                                     \
        if (!real) real = (ssize_t(*)(int, type, size_t, int))dlsym(RTLD_NEXT, #name);      \
        if (!fails(#name, fd, NULL)) return real(fd, data, size, flags);                    \
        int why = errno;                                                                    \
        shutdown(fd, SHUT_RDWR);                                                            \
        return errno = why, -1;                                                             \
    }
CONNECTION(send, const void *)
CONNECTION(recv, void *)

WRAP(int, fsync, "fsync", fd, NULL, (int fd), fd)
WRAP(int, fdatasync, "fsync", fd, NULL, (int fd), fd)
WRAP(int, ftruncate, "truncate", fd, NULL, (int fd, off_t size), fd, size)
WRAP(int, ftruncate64, "truncate", fd, NULL, (int fd, off64_t size), fd, size)
WRAP(int, mkdirat, "mkdir", fd, name, (int fd, const char *name, mode_t mode), fd, name, mode)
WRAP(int, mkdir, "mkdir", AT_FDCWD, name, (const char *name, mode_t mode), name, mode)
WRAP(int, rename, "rename", AT_FDCWD, to, (const char *from, const char *to), from, to)
WRAP(int, renameat, "rename", into, to, (int fd, const char *from, int into, const char *to), fd, from, into, to)
WRAP(int, renameat2, "exchange", into, to, (int fd, const char *from, int into, const char *to, unsigned flags), fd, from, into, to, flags)
WRAP(int, link, "link", AT_FDCWD, to, (const char *from, const char *to), from, to)
WRAP(int, linkat, "link", into, to, (int fd, const char *from, int into, const char *to, int flags), fd, from, into, to, flags)

int posix_fallocate(int fd, off_t from, off_t size) {
    static int (*real)(int, off_t, off_t);
    if (!real) real = (int (*)(int, off_t, off_t))dlsym(RTLD_NEXT, "posix_fallocate");
    return fails("truncate", fd, NULL) ? errno : real(fd, from, size);
}

/* Opening fails if it is for writing or makes a file ("create"), or else as "open". */
#define OPEN(name)                                                                          \
    int name(int fd, const char *path, int flags, ...) {                                    \
        static int (*real)(int, const char *, int, ...);                                    \
        if (!real) real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name);    \
        mode_t mode = 0;                                                                    \
        if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                                                \
            __builtin_va_list all;                                                          \
            __builtin_va_start(all, flags);                                                 \
            mode = __builtin_va_arg(all, mode_t);                                           \
            __builtin_va_end(all);                                                          \
        }                                                                                   \
        const char *label = flags & (O_CREAT | O_WRONLY | O_RDWR) ? "create" : "open";      \
        if (fails(label, fd, path)) return -1;                                              \
        return real(fd, path, flags, mode);                                                 \
    }
OPEN(openat)
OPEN(openat64)

#define OPEN_PATH(name, other) \
    int name(const char *path, int flags, ...) {                                            \
        mode_t mode = 0;                                                                    \
        if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                                                \
            __builtin_va_list all;                                                          \
            __builtin_va_start(all, flags);                                                 \
            mode = __builtin_va_arg(all, mode_t);                                           \
            __builtin_va_end(all);                                                          \
        }                                                                                   \
        return other(AT_FDCWD, path, flags, mode);                                          \
    }
OPEN_PATH(open, openat)
OPEN_PATH(open64, openat64)

/* The time of day jumps to and fro, from one call to the next. */
int clock_gettime(clockid_t clock, struct timespec *time) {
    int result = syscall(SYS_clock_gettime, clock, time);
    if (!result && clock == CLOCK_REALTIME && jumps)
        time->tv_sec += __atomic_fetch_add(&shared->clock, 1, __ATOMIC_SEQ_CST) % 2 ? jumps : -jumps;
    return result;
}
