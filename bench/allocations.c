/* Counts the bytes that a process has allocated and the most that it ever had, over all its threads.
 *
 * Preloaded into a process, it replaces the C library's allocation functions by the C library's own under their
 * other names (glibc), with two counters beside them. Blocks below COUNTED_BYTES are left out: torch's tensors are
 * what is looked for, and small blocks would cost time.
 */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

#define COUNTED_BYTES 2048

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *block, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);

static atomic_long current, highest;

long allocations_current(void) { return atomic_load(&current); }
long allocations_highest(void) { return atomic_load(&highest); }
void allocations_start_phase(void) { atomic_store(&highest, atomic_load(&current)); }

static void *added(void *block) {
    long size = block ? (long)malloc_usable_size(block) : 0;
    if (size < COUNTED_BYTES) return block;
    long now = atomic_fetch_add(&current, size) + size;
    long before = atomic_load(&highest);
    while (now > before && !atomic_compare_exchange_weak(&highest, &before, now)) {}
    return block;
}

static void removed(void *block) {
    long size = block ? (long)malloc_usable_size(block) : 0;
    if (size >= COUNTED_BYTES) atomic_fetch_sub(&current, size);
}

void *malloc(size_t size) { return added(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return added(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *made = added(__libc_memalign(alignment, size));
    if (!made) return ENOMEM;
    *block = made;
    return 0;
}

void *realloc(void *block, size_t size) {
    long before = block ? (long)malloc_usable_size(block) : 0;
    void *made = __libc_realloc(block, size);
    if (!made && size) return made;
    if (before >= COUNTED_BYTES) atomic_fetch_sub(&current, before);
    return added(made);
}

void free(void *block) {
    removed(block);
    __libc_free(block);
}
