/* Makes writes to one folder fail: LD_PRELOAD it, then call fault_arm(). Every operation on a file under the folder
   (open for writing, write, fsync, rename, ftruncate, mkdir) counts as one point; the operation at the armed point
   fails. Built and used by benchmarks/disk.py. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NONE, SHORT = -1 };

static char folder[4096];
static long at = -1, seen = 0, failed = 0;
static int kind = NONE, sticky = 0;
static long jump = 0;

/* kind: an errno, or SHORT: a write that writes half of its bytes. point < 0 only counts. */
void fault_arm(const char *path, int what, long point, int for_good) {
    strncpy(folder, path, sizeof folder - 1);
    kind = what, at = point, sticky = for_good, seen = 0, failed = 0;
}
long fault_seen(void) { return seen; }
long fault_failed(void) { return failed; }
void fault_clock(long seconds) { jump = seconds; }

static int due(void) {
    if (!folder[0]) return 0;
    long now = seen++;
    if (at < 0 || (sticky ? now < at : now != at)) return 0;
    failed++;
    return 1;
}
static int inside(const char *path) { return folder[0] && path && !strncmp(path, folder, strlen(folder)); }
static int inside_fd(int fd) {
    char link[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return inside(path);
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(value) do { errno = kind; return value; } while (0)

ssize_t write(int fd, const void *bytes, size_t n) {
    if (inside_fd(fd) && due()) {
        if (kind != SHORT) FAIL(-1);
        n = n > 1 ? n / 2 : n;
    }
    return REAL(write)(fd, bytes, n);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    if (inside_fd(fd) && due()) {
        if (kind != SHORT) FAIL(-1);
        return REAL(write)(fd, parts[0].iov_base, parts[0].iov_len > 1 ? parts[0].iov_len / 2 : parts[0].iov_len);
    }
    return REAL(writev)(fd, parts, n);
}
ssize_t pwrite64(int fd, const void *bytes, size_t n, off64_t place) {
    if (inside_fd(fd) && due()) {
        if (kind != SHORT) FAIL(-1);
        n = n > 1 ? n / 2 : n;
    }
    return REAL(pwrite64)(fd, bytes, n, place);
}
#define SIMPLE(declaration, call, test) \
    declaration { if ((test) && due() && kind != SHORT) FAIL(-1); return call; }
SIMPLE(int fsync(int fd), REAL(fsync)(fd), inside_fd(fd))
SIMPLE(int fdatasync(int fd), REAL(fdatasync)(fd), inside_fd(fd))
SIMPLE(int ftruncate64(int fd, off64_t n), REAL(ftruncate64)(fd, n), inside_fd(fd))
SIMPLE(int rename(const char *a, const char *b), REAL(rename)(a, b), inside(b))
SIMPLE(int mkdir(const char *path, mode_t mode), REAL(mkdir)(path, mode), inside(path))
SIMPLE(int unlink(const char *path), REAL(unlink)(path), inside(path))

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if ((flags & (O_WRONLY | O_RDWR)) && inside(path) && due() && kind != SHORT) FAIL(-1); \
        return REAL(name)(path, flags, mode); }
OPENS(open)
OPENS(open64)

int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = REAL(clock_gettime)(clock, now);
    if (jump && clock == CLOCK_REALTIME) now->tv_sec += random() % (2 * jump) - jump;
    return done;
}
