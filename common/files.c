#include "files.h"
#include "error.h"
#include "stop.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PATH_BYTES = FILES_PATH_SIZE,
    HOST_BYTES = 65,
    LINKS_MAX = 40, // symbolic links that are followed before they count as a circle
    SWAPS_MAX = 100, // attempts to replace a folder that others replace at the same time
    LOCK_TRIES = 100, // then the lock is taken to be somebody else's business
    LOCK_WAIT_MS = 50,
    READER_WAIT_MS = 20, // between two looks whether somebody reads a pipe
};

// ---- reading -----------------------------------------------------------------------------------

FILE *files_open(const char *path, uint64_t *bytes, char *error, size_t error_size) {
    // O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status;
    if (fd < 0 && errno == ENOENT) {
        error_text(error, error_size, "%s: there is no such file", path);
        return NULL;
    }
    if (fd < 0 || fstat(fd, &status) != 0) {
        error_text(error, error_size, "%s: cannot be opened: %s", path, strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        error_text(error, error_size, "%s: is %s; expected a file", path,
                   S_ISDIR(status.st_mode) ? "a folder" : "not a regular file");
    } else {
        FILE *file = fdopen(fd, "rb");
        CHECK(file != NULL);
        if (bytes != NULL) {
            *bytes = (uint64_t)status.st_size;
        }
        return file;
    }
    if (fd >= 0) {
        close(fd);
    }
    return NULL;
}

// ---- writing, in place -------------------------------------------------------------------------

static bool is_pipe(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISFIFO(status.st_mode);
}

FILE *files_create(const char *path) {
    const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK;
    int fd = open(path, flags, 0666);
    while (fd < 0 && errno == ENXIO && is_pipe(path) && !stop_requested()) {
        usleep(READER_WAIT_MS * 1000);
        fd = open(path, flags, 0666);
    }
    if (fd < 0) {
        errno = errno == ENXIO && is_pipe(path) ? EINTR : errno;
        return NULL;
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    FILE *file = fdopen(fd, "wb");
    CHECK(file != NULL);
    return file;
}

bool files_sync(FILE *file) {
    return fflush(file) == 0 &&
           (fsync(fileno(file)) == 0 || errno == EINVAL || errno == EROFS); // a pipe, a device
}

// ---- paths -------------------------------------------------------------------------------------

// Where a file or folder is, or shall be; see files_resolve().
struct place {
    char path[PATH_BYTES];
    char parent[PATH_BYTES];
    const char *base; // the last part of path
};

static bool sync_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    bool good = fsync(fd) == 0 || errno == EINVAL; // some file systems cannot sync folders
    close(fd);
    return good;
}

// Copies and joins; false if it is too long.
static bool path_join(char *out, const char *folder, const char *name) {
    bool root = strcmp(folder, "/") == 0;
    return snprintf(out, PATH_BYTES, "%s/%s", root ? "" : folder, name) < PATH_BYTES;
}

// Splits an absolute path at the last slash: "/a/b" is /a and b, "/b" is / and b.
static void path_split(const char *path, char *parent, const char **base) {
    const char *slash = strrchr(path, '/');
    size_t length = slash == path ? 1 : (size_t)(slash - path);
    *base = slash + 1;
    memcpy(parent, path, length);
    parent[length] = '\0';
}

// Makes one folder if it is not there yet.
static bool make_folder(const char *path, char *error, size_t error_size) {
    struct stat status;
    char parent[PATH_BYTES];
    const char *base;
    if (stat(path, &status) != 0) {
        if (errno != ENOENT) {
            return error_text(error, error_size, "%s: %s", path, strerror(errno));
        }
        if (mkdir(path, 0777) == 0) {
            path_split(path, parent, &base);
            sync_folder(parent);
            return true;
        }
        if (errno != EEXIST || stat(path, &status) != 0) {
            return error_text(error, error_size, "the folder %s cannot be made: %s", path,
                              strerror(errno));
        }
    }
    return S_ISDIR(status.st_mode) ||
           error_text(error, error_size, "%s: is a file; expected a folder", path);
}

// Makes the folder and all above it; they are for `purpose`, a path that the user knows.
static bool make_folders(const char *path, const char *purpose, char *error, size_t error_size) {
    char part[PATH_BYTES], reason[ERROR_TEXT_SIZE];
    for (size_t end = 1; path[end - 1] != '\0'; end++) {
        if (path[end] != '/' && path[end] != '\0') {
            continue;
        }
        memcpy(part, path, end);
        part[end] = '\0';
        if (!make_folder(part, reason, sizeof reason)) {
            return error_text(error, error_size, "%s: %s", purpose, reason);
        }
        if (path[end] == '\0') {
            break;
        }
    }
    return true;
}

// Takes the first part off a path, and the slashes around it; false if there is none.
static bool path_shift(char *path, char *part) {
    char *begin = path + strspn(path, "/");
    size_t length = strcspn(begin, "/");
    const char *rest = begin + length + strspn(begin + length, "/");
    memcpy(part, begin, length);
    part[length] = '\0';
    memmove(path, rest, strlen(rest) + 1);
    return length > 0;
}

// Goes from the folder `at` to `part` of it. If that is a symbolic link, stays, and what the link
// says goes in front of the rest of the path. False if something becomes too long.
static bool path_step(char *at, const char *part, char *rest, int *links) {
    char next[PATH_BYTES], target[PATH_BYTES], longer[PATH_BYTES];
    if (strcmp(part, ".") == 0) {
        return true;
    }
    if (strcmp(part, "..") == 0) {
        char *slash = strrchr(at, '/');
        slash[slash == at] = '\0'; // the slash of the root stays
        return true;
    }
    if (!path_join(next, at, part)) {
        return false;
    }
    ssize_t length = readlink(next, target, sizeof target - 1);
    if (length <= 0) {
        strcpy(at, next);
        return true;
    }
    target[length] = '\0';
    ++*links;
    if (target[0] == '/') {
        strcpy(at, "/");
    }
    if (snprintf(longer, sizeof longer, "%s/%s", target, rest) >= PATH_BYTES) {
        return false;
    }
    strcpy(rest, longer);
    return true;
}

bool files_resolve(const char *path, char *out, char *error, size_t error_size) {
    char rest[PATH_BYTES], part[PATH_BYTES];
    int links = 0;
    if (path[0] == '\0') {
        return error_text(error, error_size, "\"\": the path is empty");
    }
    bool fits = strlen(path) < sizeof rest;
    strcpy(rest, fits ? path : "");
    strcpy(out, "/");
    if (path[0] != '/' && (getcwd(out, PATH_BYTES) == NULL || out[0] != '/')) {
        return error_text(error, error_size,
                          "%.80s: the current folder is not there any more; change to another one",
                          path);
    }
    while (fits && links <= LINKS_MAX && path_shift(rest, part)) {
        fits = path_step(out, part, rest, &links);
    }
    if (!fits) {
        return error_text(error, error_size, "%.80s ...: the path is too long", path);
    }
    return links <= LINKS_MAX || error_text(error, error_size, "%s: %s", path, strerror(ELOOP));
}

// With `create` missing parents are made.
static bool place_find(struct place *place, const char *path, bool create, char *error,
                       size_t error_size) {
    if (!files_resolve(path, place->path, error, error_size)) {
        return false;
    }
    path_split(place->path, place->parent, &place->base);
    return !create || make_folders(place->parent, path, error, error_size);
}

// ---- temporary names and rubbish ---------------------------------------------------------------

static void host_name(char host[HOST_BYTES]) {
    memset(host, 0, HOST_BYTES);
    if (gethostname(host, HOST_BYTES - 1) != 0 || host[0] == '\0') {
        strcpy(host, "localhost");
    }
    for (char *c = host; *c != '\0'; c++) {
        *c = *c == '/' ? '_' : *c;
    }
}

// PATH.tmp-HOST-PID-N; false if it is too long.
static bool temporary_name(char *out, const struct place *place, int n) {
    char host[HOST_BYTES];
    host_name(host);
    return snprintf(out, PATH_BYTES, "%s.tmp-%s-%ld-%d", place->path, host, (long)getpid(), n) <
           PATH_BYTES;
}

static bool old_name(char *out, const struct place *place) {
    return snprintf(out, PATH_BYTES, "%s.tmp-old", place->path) < PATH_BYTES;
}

// The process whose temporary file or folder this is, 0 if it is not one of this host's.
static pid_t temporary_owner(const char *name, const struct place *place) {
    char prefix[PATH_BYTES], host[HOST_BYTES];
    char *end;
    host_name(host);
    if (snprintf(prefix, sizeof prefix, "%s.tmp-%s-", place->base, host) >= PATH_BYTES ||
        strncmp(name, prefix, strlen(prefix)) != 0) {
        return 0;
    }
    const char *digits = name + strlen(prefix);
    long pid = strtol(digits, &end, 10);
    if (end == digits || *end != '-' || pid <= 0 || pid > INT_MAX) {
        return 0;
    }
    return end[1 + strspn(end + 1, "0123456789")] == '\0' && end[1] != '\0' ? (pid_t)pid : 0;
}

// Removes the folder with those of its files whose names are in the list, never anything else.
static bool remove_folder(const char *path, const char *const *names) {
    char file[PATH_BYTES];
    if (access(path, W_OK | X_OK) != 0) {
        (void)!chmod(path, 0700); // it has taken the mode of one that nobody may change
    }
    for (size_t k = 0; names[k] != NULL; k++) {
        if (path_join(file, path, names[k])) {
            unlink(file);
        }
    }
    return rmdir(path) == 0;
}

// Removes what a process that is no more has left. Whoever writes holds the lock of its temporary
// file or folder, so that one of another container, whose process cannot be seen, is spared too.
static void remove_if_dead(const char *path, pid_t owner, const char *const *names) {
    struct stat status;
    if (owner != getpid() && (kill(owner, 0) == 0 || errno != ESRCH)) {
        return;
    }
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        return;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &status) == 0) {
        if (names != NULL && S_ISDIR(status.st_mode)) {
            remove_folder(path, names);
        } else if (names == NULL && S_ISREG(status.st_mode)) {
            unlink(path);
        }
    }
    close(fd);
}

// Removes leftovers of dead processes beside the place: folders, or with names NULL files.
static void remove_rubbish(const struct place *place, const char *const *names) {
    char path[PATH_BYTES];
    DIR *folder = opendir(place->parent);
    struct dirent *entry;
    if (folder == NULL) {
        return;
    }
    while ((entry = readdir(folder)) != NULL) {
        pid_t owner = temporary_owner(entry->d_name, place);
        if (owner != 0 && path_join(path, place->parent, entry->d_name)) {
            remove_if_dead(path, owner, names);
        }
    }
    closedir(folder);
}

// ---- one file ----------------------------------------------------------------------------------

struct files_write {
    struct place place;
    char temporary[PATH_BYTES]; // empty: a device or a pipe, which is written itself
    FILE *stream;
};

static bool write_open(struct files_write *w, char *error, size_t error_size) {
    int fd = -1;
    struct stat status;
    for (int n = 0; fd < 0; n++) {
        if (!temporary_name(w->temporary, &w->place, n)) {
            return error_text(error, error_size, "%s: the path is too long", w->place.path);
        }
        fd = open(w->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0 && errno != EEXIST) {
            return error_text(error, error_size, "%s: cannot be written: %s", w->place.path,
                              strerror(errno));
        }
    }
    flock(fd, LOCK_EX | LOCK_NB);
    if (stat(w->place.path, &status) == 0) {
        (void)!fchmod(fd, status.st_mode & 0777); // as it was
    }
    w->stream = fdopen(fd, "wb");
    CHECK(w->stream != NULL);
    return true;
}

// Whether it is a device or a pipe, which cannot be replaced by a file.
static bool is_special(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

static bool special_open(struct files_write *w, const char *path, char *error, size_t error_size) {
    snprintf(w->place.path, sizeof w->place.path, "%s", path);
    w->stream = files_create(path);
    return w->stream != NULL ||
           error_text(error, error_size, "%s: cannot be written: %s", path, strerror(errno));
}

static bool file_open(struct files_write *w, const char *path, char *error, size_t error_size) {
    struct stat status;
    if (!place_find(&w->place, path, true, error, error_size)) {
        return false;
    }
    if (stat(w->place.path, &status) == 0 && S_ISDIR(status.st_mode)) {
        return error_text(error, error_size, "%s: is a folder; expected a file or nothing", path);
    }
    remove_rubbish(&w->place, NULL);
    return write_open(w, error, error_size);
}

struct files_write *files_write_begin(const char *path, char *error, size_t error_size) {
    struct files_write *w = calloc(1, sizeof *w);
    CHECK(w != NULL);
    bool good = is_special(path) ? special_open(w, path, error, error_size)
                                 : file_open(w, path, error, error_size);
    if (!good) {
        free(w);
        return NULL;
    }
    return w;
}

FILE *files_write_stream(struct files_write *w) {
    return w->stream;
}

const char *files_write_path(const struct files_write *w) {
    return w->temporary[0] != '\0' ? w->temporary : w->place.path;
}

bool files_write_commit(struct files_write *w, char *error, size_t error_size) {
    bool failed = ferror(w->stream) != 0;
    bool special = w->temporary[0] == '\0';
    if (failed || !files_sync(w->stream) ||
        (!special && rename(w->temporary, w->place.path) != 0)) {
        error_text(error, error_size, "%s: cannot be written: %s", w->place.path,
                   failed ? "an earlier write failed" : strerror(errno));
        files_write_abandon(w);
        return false;
    }
    fclose(w->stream);
    if (!special) {
        sync_folder(w->place.parent);
    }
    free(w);
    return true;
}

void files_write_abandon(struct files_write *w) {
    if (w != NULL) {
        if (w->temporary[0] != '\0') {
            unlink(w->temporary);
        }
        fclose(w->stream);
        free(w);
    }
}

// ---- a folder ----------------------------------------------------------------------------------

struct files_folder {
    struct place place;
    char temporary[PATH_BYTES];
    const char *const *names;
    int lock; // the temporary folder, open and locked
    bool replaces; // a folder was there at the beginning
    struct stat old; // what it was, if so
};

static bool is_listed(const char *name, const char *const *names) {
    for (size_t k = 0; names[k] != NULL; k++) {
        if (strcmp(name, names[k]) == 0) {
            return true;
        }
    }
    return false;
}

static bool check_contents(const char *path, const char *const *names, char *error,
                           size_t error_size) {
    DIR *folder = opendir(path);
    struct dirent *entry;
    bool good = true;
    if (folder == NULL) {
        return errno == ENOENT || error_text(error, error_size, "%s: %s", path, strerror(errno));
    }
    while (good && (entry = readdir(folder)) != NULL) {
        const char *name = entry->d_name;
        struct stat status;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
            continue;
        }
        bool there = fstatat(dirfd(folder), name, &status, AT_SYMLINK_NOFOLLOW) == 0;
        if (!there && errno == ENOENT) {
            continue; // another process has just replaced the folder and removes this one
        }
        bool is_file = there && !S_ISDIR(status.st_mode);
        if (!is_listed(name, names) || !is_file) {
            good =
                error_text(error, error_size,
                           "%s: the folder also holds %s, which would be deleted when the folder "
                           "is replaced; name another folder, or move it away",
                           path, name);
        }
    }
    closedir(folder);
    return good;
}

static bool is_mount_point(const char *path) {
    struct statx status;
    return statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, 0, &status) == 0 &&
           (status.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0 &&
           (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

// Whether this user may rename a folder of somebody else, and then empty it.
static bool check_owner(const struct place *place, const struct stat *status, char *error,
                        size_t error_size) {
    uid_t me = geteuid();
    struct stat parent;
    if (me == 0 || status->st_uid == me) {
        return true;
    }
    bool sticky =
        stat(place->parent, &parent) == 0 && (parent.st_mode & S_ISVTX) != 0 && parent.st_uid != me;
    if (sticky || access(place->path, W_OK | X_OK) != 0) {
        return error_text(
            error, error_size,
            "%s: Permission denied to replace it: it belongs to another user; name another folder",
            place->path);
    }
    return true;
}

// Whether what is in the place now, if anything, may be replaced.
static bool check_replaceable(const struct place *place, const char *const *names, char *error,
                              size_t error_size) {
    const char *path = place->path;
    char here[PATH_BYTES];
    struct stat status;
    if (lstat(path, &status) != 0) {
        return errno == ENOENT || error_text(error, error_size, "%s: %s", path, strerror(errno));
    }
    if (!S_ISDIR(status.st_mode)) {
        return error_text(error, error_size, "%s: is a file; expected a folder or nothing", path);
    }
    if (getcwd(here, sizeof here) != NULL && strcmp(here, path) == 0) {
        return error_text(error, error_size,
                          "%s: is the current folder, which cannot be replaced; name one inside it",
                          path);
    }
    if (strcmp(path, "/") == 0 || is_mount_point(path)) {
        return error_text(error, error_size,
                          "%s: is a mount point, which cannot be replaced; name a folder inside it",
                          path);
    }
    return check_owner(place, &status, error, error_size) &&
           check_contents(path, names, error, error_size);
}

// Serializes those who replace or recover a folder in steps. -1 without the lock: the file system
// has none, or somebody keeps it.
static int lock_parent(const struct place *place) {
    int fd = open(place->parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int tries = 0; fd >= 0 && tries < LOCK_TRIES; tries++) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
            return fd;
        }
        if (errno != EWOULDBLOCK) {
            break;
        }
        usleep(LOCK_WAIT_MS * 1000);
    }
    if (fd >= 0) {
        close(fd);
    }
    return -1;
}

static void unlock_parent(int fd) {
    if (fd >= 0) {
        close(fd);
    }
}

static bool exists(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0;
}

// The rule of recovery. False, with errno, if it had to be applied and could not.
static bool recover_place(const struct place *place) {
    char old[PATH_BYTES];
    if (!old_name(old, place) || exists(place->path) || !exists(old)) {
        return true;
    }
    if (rename(old, place->path) == 0) {
        sync_folder(place->parent);
        return true;
    }
    int reason = errno;
    bool good = exists(place->path); // another process was faster
    errno = reason;
    return good;
}

bool files_folder_recover(const char *dir, char *error, size_t error_size) {
    struct place place;
    char old[PATH_BYTES];
    if (!place_find(&place, dir, false, error, error_size)) {
        return false;
    }
    if (exists(place.path) || !old_name(old, &place) || !exists(old)) {
        return true;
    }
    int lock = lock_parent(&place);
    bool good = recover_place(&place);
    int reason = errno;
    unlock_parent(lock);
    return good || error_text(error, error_size,
                              "%s: is missing, since a save was interrupted; the checkpoint before "
                              "it is %s, which cannot be renamed: %s",
                              dir, old, strerror(reason));
}

// Makes the temporary folder and locks it. If it is to replace one, nobody else may look into it
// before it has that one's mode.
static bool folder_make(struct files_folder *f, char *error, size_t error_size) {
    f->replaces = stat(f->place.path, &f->old) == 0;
    for (int n = 0;; n++) {
        if (!temporary_name(f->temporary, &f->place, n)) {
            return error_text(error, error_size, "%s: the path is too long", f->place.path);
        }
        if (mkdir(f->temporary, f->replaces ? 0700 : 0777) == 0) {
            break;
        }
        if (errno != EEXIST) {
            return error_text(error, error_size, "%s: no folder can be made beside it: %s",
                              f->place.path, strerror(errno));
        }
    }
    f->lock = open(f->temporary, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (f->lock < 0) {
        rmdir(f->temporary);
        return error_text(error, error_size, "%s: cannot be opened: %s", f->temporary,
                          strerror(errno));
    }
    flock(f->lock, LOCK_EX | LOCK_NB); // without it the process' number must do
    return true;
}

// Applies the rule of recovery, then removes what is rubbish.
static bool folder_tidy(const struct files_folder *f, char *error, size_t error_size) {
    char old[PATH_BYTES];
    if (old_name(old, &f->place) && exists(old)) {
        int lock = lock_parent(&f->place);
        bool good = recover_place(&f->place);
        int reason = errno;
        if (good && exists(f->place.path)) {
            remove_folder(old, f->names);
        }
        unlock_parent(lock);
        if (!good) {
            return error_text(error, error_size, "%s: cannot be moved back to %s: %s", old,
                              f->place.path, strerror(reason));
        }
    }
    remove_rubbish(&f->place, f->names);
    return true;
}

struct files_folder *files_folder_begin(const char *dir, const char *const *names, char *error,
                                        size_t error_size) {
    struct files_folder *f = calloc(1, sizeof *f);
    CHECK(f != NULL);
    f->names = names;
    if (!place_find(&f->place, dir, true, error, error_size) ||
        !folder_tidy(f, error, error_size) ||
        !check_replaceable(&f->place, names, error, error_size) ||
        !folder_make(f, error, error_size)) {
        free(f);
        return NULL;
    }
    return f;
}

const char *files_folder_path(const struct files_folder *f) {
    return f->temporary;
}

static bool sync_contents(const char *path, char *error, size_t error_size) {
    DIR *folder = opendir(path);
    struct dirent *entry;
    bool good = folder != NULL;
    while (good && (entry = readdir(folder)) != NULL) {
        if (entry->d_name[0] == '.') {
            continue;
        }
        int fd = openat(dirfd(folder), entry->d_name, O_RDONLY | O_CLOEXEC);
        good = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL);
        if (fd >= 0) {
            close(fd);
        }
    }
    good = good && sync_folder(path);
    int reason = errno;
    if (folder != NULL) {
        closedir(folder);
    }
    return good ||
           error_text(error, error_size, "%s: cannot be synced: %s", path, strerror(reason));
}

enum swap {
    SWAP_DONE,
    SWAP_AGAIN, // somebody else moved the folder meanwhile
    SWAP_NO_FLAGS, // the file system cannot exchange names
    SWAP_FAILED, // errno says why
};

static enum swap swap_result(void) {
    switch (errno) {
    case EEXIST:
    case ENOTEMPTY:
    case ENOENT:
        return SWAP_AGAIN;
    case EINVAL:
    case ENOSYS:
        return SWAP_NO_FLAGS;
    default:
        return SWAP_FAILED;
    }
}

// In one step. Afterwards the temporary name is free, or that of the old folder.
static enum swap swap_at_once(const struct files_folder *f) {
    const char *from = f->temporary, *to = f->place.path;
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) {
        return SWAP_DONE;
    }
    if (errno != EEXIST) {
        return swap_result();
    }
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_EXCHANGE) == 0) {
        return SWAP_DONE;
    }
    return swap_result();
}

// In steps, as the rule of recovery knows them. The parent is locked, if it can be.
static enum swap swap_in_steps(const struct files_folder *f) {
    char old[PATH_BYTES];
    if (!old_name(old, &f->place)) {
        errno = ENAMETOOLONG;
        return SWAP_FAILED;
    }
    if (exists(f->place.path)) {
        remove_folder(old, f->names);
        if (rename(f->place.path, old) != 0) {
            return swap_result();
        }
    }
    if (rename(f->temporary, f->place.path) != 0) {
        enum swap result = swap_result();
        int reason = errno;
        recover_place(&f->place);
        errno = reason;
        return result;
    }
    sync_folder(f->place.parent);
    remove_folder(old, f->names);
    return SWAP_DONE;
}

static enum swap swap(const struct files_folder *f) {
    enum swap result = SWAP_AGAIN;
    for (int tries = 0; tries < SWAPS_MAX && result == SWAP_AGAIN; tries++) {
        result = swap_at_once(f);
        if (result == SWAP_NO_FLAGS) {
            int lock = lock_parent(&f->place);
            result = swap_in_steps(f);
            int reason = errno;
            unlock_parent(lock);
            errno = reason;
        }
    }
    return result;
}

// The new folder gets the mode of the old one, and its owner where that is possible.
static void folder_take_mode(const struct files_folder *f) {
    if (f->replaces) {
        (void)!fchown(f->lock, f->old.st_uid, f->old.st_gid);
        (void)!fchmod(f->lock, f->old.st_mode & 07777);
    }
}

bool files_folder_commit(struct files_folder *f, char *error, size_t error_size) {
    bool good = sync_contents(f->temporary, error, error_size) &&
                check_replaceable(&f->place, f->names, error, error_size);
    folder_take_mode(f);
    if (good && swap(f) != SWAP_DONE) {
        good = error_text(error, error_size, "%s: cannot be replaced: %s", f->place.path,
                          strerror(errno));
    }
    if (good) {
        sync_folder(f->place.parent); // before the old folder goes
    }
    files_folder_abandon(f); // what bears the temporary name now is the old folder, or failed
    return good;
}

void files_folder_abandon(struct files_folder *f) {
    if (f != NULL) {
        remove_folder(f->temporary, f->names);
        close(f->lock);
        free(f);
    }
}

bool files_folder_check(const char *dir, const char *const *names, char *error, size_t error_size) {
    char file[PATH_BYTES];
    struct files_folder *f = files_folder_begin(dir, names, error, error_size);
    if (f == NULL) {
        return false;
    }
    int fd = -1;
    if (path_join(file, f->temporary, names[0])) {
        fd = open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    }
    bool good =
        fd >= 0 || error_text(error, error_size, "%s: no file can be made in such a folder: %s",
                              f->place.path, strerror(errno));
    if (fd >= 0) {
        close(fd);
    }
    files_folder_abandon(f);
    return good;
}
