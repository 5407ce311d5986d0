#include "child.h"
#include "error.h"
#include "files.h"
#include "scratch.h"
#include "stop.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>

static char error[ERROR_TEXT_SIZE];

// ---- system calls that can fail, or kill the process -------------------------------------------

// The linker takes these for those of the C library. Each counts one, and call number kill_at ends
// the process before it is made. That loses nothing that was written, so fsync need not do
// anything.
static struct {
    int calls;
    int kill_at; // 0: never
    bool no_flags; // renameat2 knows no RENAME_NOREPLACE and no RENAME_EXCHANGE
    bool full_disk; // fsync fails
    int fail_at; // the rename of this number fails; 0: none
    int renames;
} faults;

static void count_call(void) {
    if (++faults.calls == faults.kill_at) {
        raise(SIGKILL);
    }
}

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    count_call();
    if (faults.no_flags && flags != 0) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
}

int rename(const char *from, const char *to) {
    count_call();
    if (++faults.renames == faults.fail_at) {
        errno = EIO;
        return -1;
    }
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int fsync(int fd) {
    (void)fd;
    count_call();
    errno = ENOSPC;
    return faults.full_disk ? -1 : 0;
}

int mkdir(const char *path, mode_t mode) {
    count_call();
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int unlink(const char *path) {
    count_call();
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int rmdir(const char *path) {
    count_call();
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}

static int setup(void **state) {
    memset(&faults, 0, sizeof faults);
    return scratch_setup(state);
}

#define files_test(test) cmocka_unit_test_setup_teardown(test, setup, scratch_teardown)

// ---- helpers -----------------------------------------------------------------------------------

static const char *const NAMES[] = {"config.json", "model.safetensors", NULL};

static bool exists(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0;
}

static int count_entries(const char *path) {
    int count = -2; // . and ..
    DIR *folder = opendir(path);
    assert_non_null(folder);
    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return count;
}

static const char *read_in(const char *folder, const char *name) {
    char path[2048];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return scratch_read(path);
}

static bool write_in(const char *folder, const char *name, const char *text) {
    char path[2048];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    return file != NULL && fputs(text, file) >= 0 && fclose(file) == 0;
}

// Saves a folder whose files both hold `text`.
static bool save(const char *dir, const char *text) {
    struct files_folder *f = files_folder_begin(dir, NAMES, error, sizeof error);
    if (f == NULL) {
        return false;
    }
    if (!write_in(files_folder_path(f), NAMES[0], text) ||
        !write_in(files_folder_path(f), NAMES[1], text)) {
        files_folder_abandon(f);
        return error_text(error, sizeof error, "files: %s", strerror(errno));
    }
    return files_folder_commit(f, error, sizeof error);
}

static void assert_saved(const char *dir, const char *text) {
    if (!save(dir, text)) {
        fail_msg("not saved: %s", error);
    }
    assert_string_equal(read_in(dir, NAMES[0]), text);
    assert_string_equal(read_in(dir, NAMES[1]), text);
}

static void assert_refused(const char *dir, const char *message) {
    assert_false(files_folder_check(dir, NAMES, error, sizeof error));
    assert_contains(error, message);
    assert_false(save(dir, "new"));
    assert_contains(error, message);
}

// ---- reading and single files ------------------------------------------------------------------

static void test_open(void **state) {
    (void)state;
    uint64_t bytes = 0;
    scratch_write(scratch_path("file"), "12345", 5);
    FILE *file = files_open(scratch_path("file"), &bytes, error, sizeof error);
    assert_non_null(file);
    assert_int_equal(bytes, 5);
    assert_int_equal(getc(file), '1');
    fclose(file);
    assert_null(files_open(scratch_path("missing"), NULL, error, sizeof error));
    assert_contains(error, "/missing: there is no such file");
    assert_null(files_open(scratch_folder, NULL, error, sizeof error));
    assert_contains(error, "is a folder; expected a file");
    assert_null(files_open("/dev/zero", NULL, error, sizeof error));
    assert_contains(error, "is not a regular file");
    assert_null(files_open(scratch_path("file/x"), NULL, error, sizeof error));
    assert_contains(error, "cannot be opened: Not a directory");
}

static bool write_file(const char *path, const char *text) {
    struct files_write *w = files_write_begin(path, error, sizeof error);
    if (w == NULL) {
        return false;
    }
    fputs(text, files_write_stream(w));
    return files_write_commit(w, error, sizeof error);
}

static void test_write(void **state) {
    (void)state;
    char *path = scratch_path("new/deep/file");
    assert_true(write_file(path, "one"));
    assert_string_equal(scratch_read(path), "one");
    assert_int_equal(chmod(path, 0640), 0);
    struct files_write *w = files_write_begin(path, error, sizeof error);
    fputs("two", files_write_stream(w));
    fflush(files_write_stream(w));
    assert_string_equal(scratch_read(path), "one");
    assert_true(files_write_commit(w, error, sizeof error));
    assert_string_equal(scratch_read(path), "two");
    struct stat status;
    stat(path, &status);
    assert_int_equal(status.st_mode & 0777, 0640);
    w = files_write_begin(path, error, sizeof error);
    fputs("three", files_write_stream(w));
    files_write_abandon(w);
    assert_string_equal(scratch_read(path), "two");
    assert_int_equal(count_entries(scratch_path("new/deep")), 1);
}

static void test_write_through_link(void **state) {
    (void)state;
    assert_int_equal(symlink("target", scratch_path("link")), 0);
    assert_true(write_file(scratch_path("link"), "one"));
    assert_true(write_file(scratch_path("link"), "two"));
    assert_string_equal(scratch_read(scratch_path("target")), "two");
    assert_int_equal(count_entries(scratch_folder), 2);
    assert_int_equal(symlink("circle", scratch_path("circle")), 0);
    assert_false(write_file(scratch_path("circle"), ""));
    assert_contains(error, "circle: Too many levels of symbolic links");
}

static void test_write_refused(void **state) {
    (void)state;
    scratch_write(scratch_path("file"), "old", 3);
    assert_false(write_file(scratch_folder, "x"));
    assert_contains(error, "is a folder; expected a file or nothing");
    assert_false(write_file(scratch_path("file/below"), "x"));
    assert_contains(error, "/file/below: ");
    assert_contains(error, "/file: is a file; expected a folder");
    assert_false(write_file("", "x"));
    assert_contains(error, "the path is empty");
    faults.full_disk = true;
    assert_false(write_file(scratch_path("file"), "x"));
    assert_contains(error, "cannot be written: No space left on device");
    assert_string_equal(scratch_read(scratch_path("file")), "old");
    assert_int_equal(count_entries(scratch_folder), 1);
}

// A device or a pipe stays what it is.
static void test_write_special(void **state) {
    (void)state;
    struct stat status;
    char text[8] = "";
    assert_true(write_file("/dev/null", "x"));
    assert_int_equal(stat("/dev/null", &status), 0);
    assert_true(S_ISCHR(status.st_mode));
    assert_false(write_file("/dev/full", "x"));
    assert_contains(error, "/dev/full: cannot be written: No space left on device");
    assert_int_equal(mkfifo(scratch_path("pipe"), 0777), 0);
    int reader = open(scratch_path("pipe"), O_RDONLY | O_NONBLOCK);
    assert_true(write_file(scratch_path("pipe"), "text"));
    assert_int_equal(read(reader, text, sizeof text), 4);
    assert_string_equal(text, "text");
    close(reader);
    assert_int_equal(count_entries(scratch_folder), 1);
}

static void pipe_body(void *argument) {
    stop_init();
    kill(getpid(), SIGTERM);
    FILE *file = files_create(argument);
    exit(file == NULL && errno == EINTR ? 0 : 1);
}

// Nobody may have to wait for ever for somebody who reads.
static void test_pipe_without_reader(void **state) {
    (void)state;
    assert_int_equal(mkfifo(scratch_path("pipe"), 0777), 0);
    struct child child = child_run(pipe_body, scratch_path("pipe"));
    assert_int_equal(child.exit_code, 0);
}

static void small_files_body(void *argument) {
    struct rlimit limit, small;
    struct files_write *w = files_write_begin(argument, error, sizeof error);
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &limit);
    small = limit;
    small.rlim_cur = 1024;
    setrlimit(RLIMIT_FSIZE, &small);
    for (int i = 0; i < 10000; i++) {
        fputs("0123456789", files_write_stream(w));
    }
    setrlimit(RLIMIT_FSIZE, &limit);
    exit(files_write_commit(w, error, sizeof error) ? 1 : 0);
}

// A write that failed long before the end is not forgotten when later ones go well.
static void test_write_early_failure(void **state) {
    (void)state;
    scratch_write(scratch_path("file"), "old", 3);
    struct child child = child_run(small_files_body, scratch_path("file"));
    assert_int_equal(child.exit_code, 0);
    assert_string_equal(scratch_read(scratch_path("file")), "old");
    assert_int_equal(count_entries(scratch_folder), 1);
}

// ---- where paths lead --------------------------------------------------------------------------

static void assert_resolved(const char *path, const char *expected) {
    char out[FILES_PATH_SIZE];
    if (!files_resolve(path, out, error, sizeof error)) {
        fail_msg("%s: %s", path, error);
    }
    assert_string_equal(out, expected);
}

static void test_resolve(void **state) {
    (void)state;
    assert_int_equal(mkdir(scratch_path("dir"), 0777), 0);
    assert_int_equal(symlink("dir/../dir/new", scratch_path("link")), 0);
    assert_int_equal(symlink(scratch_path("link"), scratch_path("second")), 0);
    assert_resolved("/", "/");
    assert_resolved("/..//.", "/");
    assert_resolved(scratch_path(""), scratch_folder);
    assert_resolved(scratch_path("dir//"), scratch_path("dir"));
    assert_resolved(scratch_path("./new//deep/../x/"), scratch_path("new/x"));
    assert_resolved(scratch_path("link"), scratch_path("dir/new"));
    assert_resolved(scratch_path("second/file"), scratch_path("dir/new/file"));
    char *here = getcwd(NULL, 0);
    assert_int_equal(chdir(scratch_path("dir")), 0);
    assert_resolved("x", scratch_path("dir/x"));
    assert_resolved("../x", scratch_path("x"));
    assert_int_equal(chdir(here), 0);
    free(here);
}

static char *long_path(size_t count, const char *part) {
    char *path = calloc(count, strlen(part) + 1);
    for (size_t i = 0; i < count; i++) {
        strcat(path, part);
    }
    return path;
}

static void gone_body(void *argument) {
    char out[FILES_PATH_SIZE];
    assert_int_equal(chdir(argument), 0);
    assert_int_equal(rmdir(argument), 0);
    if (!files_resolve("x", out, error, sizeof error)) {
        fputs(error, stderr);
    }
}

static void test_resolve_refused(void **state) {
    (void)state;
    char out[FILES_PATH_SIZE];
    assert_int_equal(symlink("circle/x", scratch_path("circle")), 0);
    assert_false(files_resolve(scratch_path("circle"), out, error, sizeof error));
    assert_contains(error, "circle: Too many levels of symbolic links");
    assert_false(files_resolve("", out, error, sizeof error));
    assert_contains(error, "the path is empty");
    for (int deep = 0; deep < 2; deep++) {
        char *path = long_path(5000, deep ? "/a" : "a");
        assert_false(files_resolve(path, out, error, sizeof error));
        assert_contains(error, ": the path is too long");
        free(path);
    }
    char *deepest = long_path(2000, "/a");
    assert_resolved(deepest, deepest);
    free(deepest);
    assert_int_equal(mkdir(scratch_path("gone"), 0777), 0);
    struct child child = child_run(gone_body, scratch_path("gone"));
    assert_contains(child.err, "x: the current folder is not there any more");
}

// ---- folders -----------------------------------------------------------------------------------

static void replace_twice(const char *dir) {
    assert_saved(dir, "one");
    assert_saved(dir, "two");
    assert_int_equal(count_entries(dir), 2);
}

static void test_folder(void **state) {
    (void)state;
    char *dir = scratch_path("new/deep/dir/x");
    assert_true(files_folder_check(dir, NAMES, error, sizeof error));
    assert_false(exists(dir));
    replace_twice(dir);
    assert_int_equal(count_entries(scratch_path("new/deep/dir")), 1);
    faults.no_flags = true;
    replace_twice(dir);
    assert_int_equal(count_entries(scratch_path("new/deep/dir")), 1);
    struct files_folder *f = files_folder_begin(dir, NAMES, error, sizeof error);
    write_in(files_folder_path(f), NAMES[0], "three");
    files_folder_abandon(f);
    assert_string_equal(read_in(dir, NAMES[0]), "two");
    assert_int_equal(count_entries(scratch_path("new/deep/dir")), 1);
}

static void test_folder_spellings(void **state) {
    (void)state;
    char here[1024];
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(scratch_folder), 0);
    assert_saved("a///", "one");
    assert_saved("./a", "two");
    assert_saved("a/../a/", "three");
    assert_saved("a/.", "four");
    assert_saved("b/.", "five");
    assert_saved("c//d", "six");
    assert_string_equal(read_in("a", NAMES[0]), "four");
    assert_int_equal(mkdir("empty", 0777), 0);
    assert_saved("empty", "one");
    assert_int_equal(count_entries("."), 4);
    assert_int_equal(chdir("a"), 0);
    assert_refused(".", "is the current folder");
    assert_refused("../a/", "is the current folder");
    assert_int_equal(chdir(here), 0);
}

static void test_folder_through_link(void **state) {
    (void)state;
    assert_int_equal(symlink("store/run1", scratch_path("latest")), 0);
    replace_twice(scratch_path("latest")); // made behind a link to nothing, then replaced there
    assert_int_equal(count_entries(scratch_folder), 2);
    assert_string_equal(read_in(scratch_path("store/run1"), NAMES[1]), "two");
    assert_int_equal(count_entries(scratch_path("store")), 1);
}

static void test_folder_refused(void **state) {
    (void)state;
    scratch_write(scratch_path("file"), "", 0);
    assert_refused(scratch_path("file"), "/file: is a file; expected a folder or nothing");
    assert_refused(scratch_path("file/x"), "/file: is a file; expected a folder");
    assert_refused(scratch_folder, "the folder also holds file, which would be deleted");
    assert_refused("/proc", "is a mount point");
    assert_refused("/", "is a mount point");
    assert_refused("", "the path is empty");
    assert_refused("/proc/none/x", "/proc/none/x: the folder /proc/none cannot be made");
    char *dir = scratch_path("dir");
    assert_saved(dir, "one");
    assert_true(write_in(dir, "tokenizer.json", "precious"));
    assert_refused(dir, "also holds tokenizer.json, which would be deleted");
    assert_string_equal(read_in(dir, "tokenizer.json"), "precious");
    char *folder = scratch_path("folder/config.json"); // the right name, but not a file
    assert_true(write_file(scratch_path("folder/config.json/x"), ""));
    assert_true(exists(folder));
    assert_refused(scratch_path("folder"), "also holds config.json");
    char name[300];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    assert_refused(scratch_path(name), "File name too long");
}

// What came into the folder since the start of the training is not deleted either.
static void test_folder_refused_late(void **state) {
    (void)state;
    char *dir = scratch_path("dir");
    assert_saved(dir, "one");
    struct files_folder *f = files_folder_begin(dir, NAMES, error, sizeof error);
    assert_true(write_in(files_folder_path(f), NAMES[0], "two"));
    assert_true(write_in(dir, "notes.txt", "precious"));
    assert_false(files_folder_commit(f, error, sizeof error));
    assert_contains(error, "also holds notes.txt");
    assert_string_equal(read_in(dir, NAMES[0]), "one");
    assert_int_equal(count_entries(scratch_folder), 1);
}

static void read_only_body(void *argument) {
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) {
        exit(3);
    }
    if (files_folder_check(argument, NAMES, error, sizeof error)) {
        exit(1);
    }
    fputs(error, stderr);
}

static void test_folder_not_writable(void **state) {
    (void)state;
    assert_int_equal(chmod(scratch_folder, 0555), 0);
    struct child child = child_run(read_only_body, scratch_path("dir"));
    assert_int_equal(child.exit_code, 0);
    assert_contains(child.err, "/dir: no folder can be made beside it: Permission denied");
    child = child_run(read_only_body, scratch_path("deep/dir"));
    assert_contains(child.err, "/deep cannot be made: Permission denied");
    assert_int_equal(chmod(scratch_folder, 0755), 0);
}

// A folder that is replaced keeps its mode, and is closed to others while it is written.
static void test_folder_mode(void **state) {
    (void)state;
    struct stat status;
    char *dir = scratch_path("dir");
    const mode_t modes[] = {0700, 0750, 0777, 0500, 02775};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        assert_saved(dir, "one");
        assert_int_equal(chmod(dir, modes[i]), 0);
        struct files_folder *f = files_folder_begin(dir, NAMES, error, sizeof error);
        assert_int_equal(stat(files_folder_path(f), &status), 0);
        assert_int_equal(status.st_mode & 07777, 0700);
        assert_true(write_in(files_folder_path(f), NAMES[0], "two"));
        assert_true(files_folder_commit(f, error, sizeof error));
        assert_string_equal(read_in(dir, NAMES[0]), "two");
        assert_int_equal(stat(dir, &status), 0);
        assert_int_equal(status.st_mode & 07777, modes[i]);
        assert_int_equal(count_entries(scratch_folder), 1);
    }
}

static void no_mode_body(void *argument) {
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) {
        exit(3);
    }
    umask(0222);
    if (files_folder_check(argument, NAMES, error, sizeof error)) {
        exit(1);
    }
    fputs(error, stderr);
}

// A folder can be made, but no file in it.
static void test_folder_useless(void **state) {
    (void)state;
    assert_int_equal(chmod(scratch_folder, 0777), 0);
    struct child child = child_run(no_mode_body, scratch_path("dir"));
    assert_int_equal(child.exit_code, 0);
    assert_contains(child.err, "/dir: no file can be made in such a folder: Permission denied");
    assert_int_equal(count_entries(scratch_folder), 0);
}

static void test_folder_full_disk(void **state) {
    (void)state;
    char *dir = scratch_path("dir");
    assert_saved(dir, "one");
    faults.full_disk = true;
    assert_false(save(dir, "two"));
    assert_contains(error, "cannot be synced: No space left on device");
    assert_string_equal(read_in(dir, NAMES[0]), "one");
    assert_int_equal(count_entries(scratch_folder), 1);
}

// Without an exchange of names: whichever of the two renames fails, the old folder is there.
static void test_folder_failing_steps(void **state) {
    (void)state;
    char *dir = scratch_path("dir");
    faults.no_flags = true;
    for (int k = 1; k <= 2; k++) {
        assert_saved(dir, "one");
        faults.renames = 0;
        faults.fail_at = k;
        assert_false(save(dir, "two"));
        assert_contains(error, "/dir: cannot be replaced: Input/output error");
        assert_string_equal(read_in(dir, NAMES[0]), "one");
        assert_int_equal(count_entries(scratch_folder), 1);
        faults.fail_at = 0;
    }
}

// ---- rubbish and recovery ----------------------------------------------------------------------

static char *make_rubbish(const char *format, long pid) {
    char name[256], host[65] = "";
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, format, host, pid);
    char *path = scratch_path(name);
    assert_int_equal(mkdir(path, 0777), 0);
    assert_true(write_in(path, NAMES[0], "rubbish"));
    return path;
}

static void nothing_body(void *argument) {
    (void)argument;
}

static pid_t dead_pid(void) {
    pid_t pid = fork();
    if (pid == 0) {
        _exit(0);
    }
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    return pid;
}

static void test_rubbish(void **state) {
    (void)state;
    long dead = dead_pid();
    child_run(nothing_body, NULL);
    char *removed[] = {
        make_rubbish("dir.tmp-%s-%ld-0", dead), make_rubbish("dir.tmp-%s-%ld-17", dead),
        make_rubbish("dir.tmp-%s-%ld-5", getpid()), // left by another process of this number
    };
    char *spared[] = {
        make_rubbish("dir.tmp-%s-%ld-0", 1),
        make_rubbish("dir.tmp-x%s-%ld-0", dead), // another host's
        make_rubbish("dir.tmp-%s-%ld-0x", dead),
        make_rubbish("dir2.tmp-%s-%ld-0", dead),
        make_rubbish("dir.tmp-%s-%ld-", dead),
    };
    assert_saved(scratch_path("dir"), "one");
    for (size_t i = 0; i < sizeof removed / sizeof removed[0]; i++) {
        assert_false(exists(removed[i]));
    }
    for (size_t i = 0; i < sizeof spared / sizeof spared[0]; i++) {
        assert_true(exists(spared[i]));
    }
}

static void test_rubbish_with_other_files(void **state) {
    (void)state;
    char *path = make_rubbish("dir.tmp-%s-%ld-0", dead_pid());
    assert_true(write_in(path, "thesis.txt", "precious"));
    assert_saved(scratch_path("dir"), "one");
    assert_string_equal(read_in(path, "thesis.txt"), "precious");
}

static void test_rubbish_file(void **state) {
    (void)state;
    char name[256], host[65] = "";
    gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "log.tmp-%s-%ld-0", host, (long)dead_pid());
    scratch_write(scratch_path(name), "x", 1);
    assert_true(write_file(scratch_path("log"), "one"));
    assert_int_equal(count_entries(scratch_folder), 1);
}

static void test_two_in_one_process(void **state) {
    (void)state;
    char *dir = scratch_path("dir");
    struct files_folder *a = files_folder_begin(dir, NAMES, error, sizeof error);
    assert_true(write_in(files_folder_path(a), NAMES[0], "a"));
    struct files_folder *b = files_folder_begin(dir, NAMES, error, sizeof error);
    assert_true(write_in(files_folder_path(b), NAMES[0], "b"));
    assert_string_equal(read_in(files_folder_path(a), NAMES[0]), "a");
    assert_true(files_folder_commit(a, error, sizeof error));
    assert_string_equal(read_in(dir, NAMES[0]), "a");
    assert_true(files_folder_commit(b, error, sizeof error));
    assert_string_equal(read_in(dir, NAMES[0]), "b");
    assert_int_equal(count_entries(scratch_folder), 1);
}

static void test_live_process_is_spared(void **state) {
    (void)state;
    int pipes[2];
    char temporary[1024] = "";
    char *dir = scratch_path("dir");
    assert_int_equal(pipe(pipes), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct files_folder *f = files_folder_begin(dir, NAMES, error, sizeof error);
        write_in(files_folder_path(f), NAMES[0], "theirs");
        (void)!write(pipes[1], files_folder_path(f), strlen(files_folder_path(f)));
        for (;;) {
            pause();
        }
    }
    assert_true(read(pipes[0], temporary, sizeof temporary - 1) > 0);
    assert_saved(dir, "ours");
    assert_string_equal(read_in(temporary, NAMES[0]), "theirs");
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_saved(dir, "ours again");
    assert_false(exists(temporary));
    close(pipes[0]);
    close(pipes[1]);
}

static void test_recover(void **state) {
    (void)state;
    char *dir = scratch_path("dir"), *old = scratch_path("dir.tmp-old");
    assert_true(files_folder_recover(dir, error, sizeof error));
    assert_true(files_folder_recover(scratch_path("no/such/dir"), error, sizeof error));
    assert_saved(dir, "one");
    assert_true(files_folder_recover(dir, error, sizeof error));
    assert_int_equal(rename(dir, old), 0);
    assert_true(files_folder_recover(dir, error, sizeof error));
    assert_string_equal(read_in(dir, NAMES[0]), "one");
    assert_false(exists(old));
    assert_int_equal(rename(dir, old), 0);
    assert_saved(dir, "two"); // recovers first, so that a failing save would keep "one"
    assert_false(exists(old));
    assert_int_equal(mkdir(old, 0777), 0); // rubbish, since dir exists
    assert_true(files_folder_recover(dir, error, sizeof error));
    assert_string_equal(read_in(dir, NAMES[0]), "two");
    assert_saved(dir, "three");
    assert_int_equal(count_entries(scratch_folder), 1);
}

// ---- kill -9 before every system call of a save ------------------------------------------------

struct kill_case {
    char *dir;
    int kill_at;
    bool no_flags;
};

static void killed_body(void *argument) {
    struct kill_case *c = argument;
    faults.calls = 0;
    faults.kill_at = c->kill_at;
    faults.no_flags = c->no_flags;
    exit(save(c->dir, "two") ? 0 : 1);
}

// The folder is whole, old or new; the next save leaves nothing but its own.
static void check_after_kill(char *dir, bool had_one) {
    assert_true(files_folder_recover(dir, error, sizeof error));
    if (exists(dir) || had_one) {
        char text[8] = "";
        strncpy(text, read_in(dir, NAMES[0]), sizeof text - 1);
        assert_true(strcmp(text, "two") == 0 || (had_one && strcmp(text, "one") == 0));
        assert_string_equal(read_in(dir, NAMES[1]), text);
    }
    assert_saved(dir, "three");
    assert_int_equal(count_entries(scratch_folder), 1);
}

// Returns the number of calls after which the process was killed.
static int kill_everywhere(bool no_flags, bool had_one) {
    char *dir = scratch_path("dir");
    for (int k = 1;; k++) {
        scratch_teardown(NULL);
        assert_int_equal(mkdir(scratch_folder, 0777), 0);
        if (had_one) {
            assert_saved(dir, "one");
        }
        struct kill_case c = {
            .dir = dir,
            .kill_at = k,
            .no_flags = no_flags,
        };
        struct child child = child_run(killed_body, &c);
        check_after_kill(dir, had_one);
        if (child.signal != SIGKILL) {
            assert_int_equal(child.exit_code, 0);
            return k - 1;
        }
    }
}

static void test_killed(void **state) {
    (void)state;
    assert_in_range(kill_everywhere(false, false), 6, 30);
    assert_in_range(kill_everywhere(false, true), 9, 30);
    assert_in_range(kill_everywhere(true, false), 7, 30);
    assert_in_range(kill_everywhere(true, true), 12, 30);
}

// ---- several jobs, one folder ------------------------------------------------------------------

struct job {
    char *dir;
    char text[2];
    bool no_flags;
    bool recover; // only recover, as one who loads
};

static void job_body(struct job *job) {
    faults.no_flags = job->no_flags;
    for (int i = 0; i < 25; i++) {
        bool good = job->recover ? files_folder_recover(job->dir, error, sizeof error)
                                 : save(job->dir, job->text);
        if (!good) {
            fprintf(stderr, "job %s: %s\n", job->text, error);
            _exit(1);
        }
        if (!job->no_flags && !exists(job->dir)) {
            _exit(2);
        }
    }
    _exit(0);
}

static void run_jobs(bool no_flags) {
    enum { JOBS = 4 };
    char *dir = scratch_path("dir");
    pid_t pids[JOBS];
    assert_saved(dir, "0");
    for (int k = 0; k < JOBS; k++) {
        struct job job = {
            .dir = dir,
            .text = {(char)('a' + k), '\0'},
            .no_flags = no_flags,
            .recover = k == JOBS - 1,
        };
        pids[k] = fork();
        if (pids[k] == 0) {
            job_body(&job);
        }
    }
    for (int k = 0; k < JOBS; k++) {
        int status;
        assert_int_equal(waitpid(pids[k], &status, 0), pids[k]);
        assert_int_equal(status, 0);
    }
    char text[8] = "";
    strncpy(text, read_in(dir, NAMES[0]), sizeof text - 1);
    assert_true(strlen(text) == 1 && text[0] >= 'a' && text[0] < 'a' + JOBS - 1);
    assert_string_equal(read_in(dir, NAMES[1]), text);
    assert_int_equal(count_entries(dir), 2);
    assert_saved(dir, "last");
    assert_int_equal(count_entries(scratch_folder), 1);
}

static void test_jobs_exchange(void **state) {
    (void)state;
    run_jobs(false);
}

static void test_jobs_in_steps(void **state) {
    (void)state;
    run_jobs(true);
}

// Whoever replaces in steps waits for others who do.
static void test_steps_are_locked(void **state) {
    (void)state;
    char *dir = scratch_path("dir");
    int status, lock = open(scratch_folder, O_RDONLY | O_DIRECTORY);
    assert_saved(dir, "one");
    assert_int_equal(flock(lock, LOCK_EX), 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(lock);
        faults.no_flags = true;
        _exit(save(dir, "two") ? 0 : 1);
    }
    usleep(300000);
    assert_string_equal(read_in(dir, NAMES[0]), "one");
    assert_int_equal(waitpid(pid, &status, WNOHANG), 0);
    flock(lock, LOCK_UN);
    close(lock);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_string_equal(read_in(dir, NAMES[0]), "two");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        files_test(test_open),
        files_test(test_write),
        files_test(test_write_through_link),
        files_test(test_write_refused),
        files_test(test_write_special),
        files_test(test_pipe_without_reader),
        files_test(test_write_early_failure),
        files_test(test_resolve),
        files_test(test_resolve_refused),
        files_test(test_folder),
        files_test(test_folder_spellings),
        files_test(test_folder_through_link),
        files_test(test_folder_refused),
        files_test(test_folder_refused_late),
        files_test(test_folder_not_writable),
        files_test(test_folder_mode),
        files_test(test_folder_useless),
        files_test(test_folder_full_disk),
        files_test(test_folder_failing_steps),
        files_test(test_rubbish),
        files_test(test_rubbish_with_other_files),
        files_test(test_rubbish_file),
        files_test(test_two_in_one_process),
        files_test(test_live_process_is_spared),
        files_test(test_recover),
        files_test(test_killed),
        files_test(test_jobs_exchange),
        files_test(test_jobs_in_steps),
        files_test(test_steps_are_locked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
