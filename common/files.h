// Files: opened with care, written so that nobody ever reads half of one.
#ifndef SHARD_FILES_H
#define SHARD_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

// Functions that can fail take `error`, a buffer of `error_size` bytes (ERROR_TEXT_SIZE is enough):
// when they return false or NULL it holds one sentence with the path and the reason, ready for
// error_user() or for a warning. Nothing here ends the program, so that a run goes on when a save
// fails.

/**
 * @brief Opens a regular file for reading.
 *
 * Local. A missing file, a folder, a device, a pipe or a file that may not be read gives NULL.
 * Close it with fclose().
 * @param bytes its size; may be NULL
 */
FILE *files_open(const char *path, uint64_t *bytes, char *error, size_t error_size);

/**
 * @brief Opens a file for writing in place, as fopen() with "w" does.
 *
 * Local. A pipe that nobody reads yet is waited for, until stop_requested(). Close it with
 * fclose().
 * @return NULL with errno on failure; EINTR: a pipe without a reader, and a signal came
 */
FILE *files_create(const char *path);

/** @brief Flushes a stream and syncs its file; a pipe or a device that knows no sync is well
 * without. Local. False with errno on failure. */
bool files_sync(FILE *file);

enum { FILES_PATH_SIZE = 4096 }; // bytes of the longest path, with its end

/**
 * @brief Where a path leads: absolute, all symbolic links followed, no "." and "..", no slash at
 * the end.
 *
 * Local. What does not exist yet is taken by its name. Fails if a relative path has no current
 * folder any more, if links form a circle, or if the path is too long.
 * @param out (FILES_PATH_SIZE)
 */
bool files_resolve(const char *path, char *out, char *error, size_t error_size);

/** @brief A file that is being written under a temporary name. */
struct files_write;

/**
 * @brief Begins to write @p path: under a unique name beside it, until files_write_commit().
 *
 * Local. Missing parent folders are created. A symbolic link is followed, so that its target is
 * replaced and not the link. A device or a pipe cannot be replaced and is written itself, as
 * files_create() does.
 */
struct files_write *files_write_begin(const char *path, char *error, size_t error_size);

/** @brief Where to write to; belongs to @p w. Local. */
FILE *files_write_stream(struct files_write *w);

/** @brief The name of what is being written, for those who open it themselves; belongs to @p w.
 * Local. */
const char *files_write_path(const struct files_write *w);

/**
 * @brief Syncs what was written and puts it in the place of the old file in one step.
 *
 * Local. On failure (a full disk, say) the old file is untouched and the temporary one removed.
 * Frees @p w in either case.
 */
bool files_write_commit(struct files_write *w, char *error, size_t error_size);

/** @brief Removes the temporary file and frees @p w; NULL is ignored. Local. */
void files_write_abandon(struct files_write *w);

// A folder of files that belong together, such as a checkpoint, is replaced whole. Invariants:
//
// 1. The new folder is written beside DIR, as DIR.tmp-HOST-PID-N, and synced before it is moved.
// 2. DIR is replaced by an exchange of the two names (renameat2 with RENAME_EXCHANGE), so at every
//    moment DIR is the old folder or the new one, whole. Then the old one is removed.
// 3. Where the file system has no such exchange: DIR becomes DIR.tmp-old, the new folder DIR, then
//    DIR.tmp-old is removed. After a crash between the first two steps DIR is missing: the rule of
//    recovery is that DIR.tmp-old is then the checkpoint, and files_folder_recover() moves it back.
//    While DIR exists, DIR.tmp-old is rubbish.
// 4. Whatever is removed is removed by the names it may hold (the caller's list), never by
//    recursion: a folder with any other file is refused before anything is written.
// 5. Temporary folders are locked (flock) while their writer lives. The next writer removes those
//    of dead processes of its own host.

/** @brief A folder that is being written under a temporary name. */
struct files_folder;

/**
 * @brief Begins to write the folder @p dir: creates an empty temporary one beside it.
 *
 * Local; of several ranks only one calls it. Missing parents are created, a symbolic link is
 * followed, trailing slashes are ignored, rubbish of dead processes is removed and the rule of
 * recovery applied. Fails, before any training if files_folder_check() is used, when @p dir is a
 * file, the current folder, a mount point, not writable, or a folder that holds files other than
 * @p names.
 * @param names the names of all files that such a folder may hold, NULL at the end; not copied
 */
struct files_folder *files_folder_begin(const char *dir, const char *const *names, char *error,
                                        size_t error_size);

/** @brief The temporary folder: write the files here, and close them. Local. Belongs to @p f. */
const char *files_folder_path(const struct files_folder *f);

/**
 * @brief Syncs the files and puts the folder in the place of the old one, whose mode and, where
 * that is possible, owner it takes.
 *
 * Local. On failure @p dir is what it was and the temporary folder is removed. Of two jobs that
 * replace one folder at the same time one wins; the result is whole. Frees @p f in either case.
 */
bool files_folder_commit(struct files_folder *f, char *error, size_t error_size);

/** @brief Removes the temporary folder and frees @p f; NULL is ignored. Local. */
void files_folder_abandon(struct files_folder *f);

/**
 * @brief Applies the rule of recovery: call it before reading a folder that may be a checkpoint.
 *
 * Local; of several ranks one calls it before the others read. True also when there is nothing to
 * recover, or no such folder at all.
 */
bool files_folder_recover(const char *dir, char *error, size_t error_size);

/**
 * @brief Whether @p dir can be written later: what files_folder_begin() would say, found before
 * hours of training.
 *
 * Local. Creates missing parents, makes a temporary folder with a file and removes both again;
 * @p dir itself is left alone.
 */
bool files_folder_check(const char *dir, const char *const *names, char *error, size_t error_size);

#ifdef __cplusplus
}
#endif
#endif
