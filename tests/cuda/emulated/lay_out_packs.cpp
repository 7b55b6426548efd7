#include "lay_out.h"

// Rows are packed on each kind of device, in the order that its products read.
void lay_out_packs() {
    for (const emulated::DeviceKind &kind : emulated::KINDS) {
        emulated::kind = &kind;
        check_pack_kind();
    }
    emulated::kind = emulated::KINDS;
}
