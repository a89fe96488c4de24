/* Preloaded into a child: keeps a copy of each file of SYNC_ROOT as of its last fsync, and its name in the attribute
   user.synced. With SYNC_KILL=n the process kills itself right before its n-th fsync. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long syncs;

static void keep(int fd, const char *itself) {
    char copy[4096], earlier[4096], block[1 << 16];
    const char *folder = getenv("SYNC_COPIES");
    struct stat about;
    if (folder == NULL || fstat(fd, &about) || !S_ISREG(about.st_mode)) return;
    snprintf(copy, sizeof copy, "%s/%d-%ld", folder, getpid(), syncs);
    /* Not reopened if it can be read: closing another descriptor would release SQLite's locks. */
    int readable = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_WRONLY, from = readable ? fd : open(itself, O_RDONLY);
    int to = open(copy, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    off_t at = 0;
    ssize_t count;
    while ((count = pread(from, block, sizeof block, at)) > 0 && write(to, block, count) == count) at += count;
    close(to);
    if (!readable) close(from);
    ssize_t size = fgetxattr(fd, "user.synced", earlier, sizeof earlier - 1);
    if (fsetxattr(fd, "user.synced", copy, strlen(copy), 0)) abort();
    if (size > 0) { earlier[size] = 0; unlink(earlier); }
}

static int synced(int fd, const char *name) {
    int (*call)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    char itself[64], path[4096];
    const char *root = getenv("SYNC_ROOT"), *kill_at = getenv("SYNC_KILL");
    snprintf(itself, sizeof itself, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(itself, path, sizeof path - 1);
    if (root == NULL || size < (ssize_t)strlen(root) || strncmp(path, root, strlen(root))) return call(fd);
    pthread_mutex_lock(&lock);
    syncs++;
    if (kill_at != NULL && syncs == atol(kill_at)) kill(getpid(), SIGKILL);
    int result = call(fd);
    if (result == 0) keep(fd, itself);
    pthread_mutex_unlock(&lock);
    return result;
}

int fsync(int fd) { return synced(fd, "fsync"); }
int fdatasync(int fd) { return synced(fd, "fdatasync"); }
