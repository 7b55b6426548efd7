#include "abi/cancel.h"

#include "abi/status.h"

namespace luce {

CancelFlag::Entry CancelFlag::entries_[MOST];

CancelFlag::CancelFlag() {
    for (Entry &entry : entries_) {
        if (!entry.used.exchange(true)) {
            entry.raised = false;
            entry_ = &entry;
            return;
        }
    }
    fail(LUCE_E_MEMORY, "%d engines are open: close one", MOST);
}

CancelFlag::~CancelFlag() {
    entry_->handle = 0;
    entry_->used = false;
}

void CancelFlag::name(uintptr_t handle) {
    entry_->handle = handle;
}

bool CancelFlag::is_raised() const {
    return entry_->raised;
}

bool CancelFlag::take() {
    return entry_->raised.exchange(false);
}

bool CancelFlag::raise(uintptr_t handle) {
    for (Entry &entry : entries_) {
        if (handle != 0 && entry.handle.load() == handle) {
            entry.raised = true;
            return true;
        }
    }
    return false;
}

} // namespace luce
