// Errors inside the core are thrown as Error; the ABI (abi.h) turns them into a status.
#pragma once

#include "luce.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace luce {

// Copies of an error share its text, so that to keep one takes no memory.
class Error : public std::runtime_error {
public:
    Error(luce_status code, const std::string &message) : std::runtime_error(message), code_(code) {}
    luce_status code() const { return code_; }

private:
    luce_status code_;
};

#if defined(__GNUC__)
#define LUCE_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define LUCE_PRINTF(f, a)
#endif

// Formats as printf does. Control characters and invalid UTF-8 (names out of a damaged file) become '?'.
std::string format(const char *fmt, ...) LUCE_PRINTF(1, 2);

[[noreturn]] void fail(luce_status code, const char *fmt, ...) LUCE_PRINTF(2, 3);

// gives "17.2 GiB", "640 MiB"
std::string human_bytes(uint64_t n);

// Sets the calling thread's last error. Where there is no memory for the message, one is kept that needs
// none.
void set_last_error(const char *message) noexcept;
const char *last_error();

// Sets the log callback. Without one messages go nowhere.
void set_log(luce_log_fn fn, void *user);
bool is_logged();
void log(int level, const char *fmt, ...) LUCE_PRINTF(2, 3);

} // namespace luce
