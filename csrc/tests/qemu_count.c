/* A plugin of qemu-user 7 or later: prints the number of instructions that the guest executed.
 *
 *     qemu-aarch64 -plugin ./qemu_count.so -d plugin PROGRAM
 *
 * The declarations are those of qemu-plugin.h, which Debian does not package. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
enum { INLINE_ADD_U64 = 0 };
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* tb, int op, void* counter, uint64_t amount);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*callback)(qemu_plugin_id_t, void*), void* argument);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* tb);
void qemu_plugin_outs(const char* text);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;
static uint64_t count;

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb* tb) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(tb, INLINE_ADD_U64, &count, qemu_plugin_tb_n_insns(tb));
}

static void on_exit_of_guest(qemu_plugin_id_t id, void* argument) {
  (void)id, (void)argument;
  char text[64];
  snprintf(text, sizeof text, "instructions %" PRIu64 "\n", count);
  qemu_plugin_outs(text);
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const void* info, int argc, char** argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
  qemu_plugin_register_atexit_cb(id, on_exit_of_guest, NULL);
  return 0;
}
