#include "abi/status.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace luce {
namespace {

thread_local std::string t_last_error;

std::mutex g_log_mutex;
luce_log_fn g_log_fn = nullptr;
void *g_log_user = nullptr;

// Returns the length of the valid UTF-8 sequence at s (n bytes left), and 0 if there is none.
size_t utf8_length(const unsigned char *s, size_t n) {
    const size_t len = s[0] < 0x80   ? 1
                       : s[0] < 0xc2 ? 0
                       : s[0] < 0xe0 ? 2
                       : s[0] < 0xf0 ? 3
                       : s[0] < 0xf5 ? 4
                                     : 0;
    if (len == 0 || len > n) {
        return 0;
    }
    for (size_t i = 1; i < len; i++) {
        if ((s[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f)) {
        return 0;
    }
    return len;
}

std::string printable(const std::string &text) {
    std::string out;
    const auto *s = reinterpret_cast<const unsigned char *>(text.data());
    for (size_t i = 0; i < text.size();) {
        const size_t len = utf8_length(s + i, text.size() - i);
        if (len == 0 || s[i] < 0x20 || s[i] == 0x7f) {
            out += '?';
            i++;
        } else {
            out.append(text, i, len);
            i += len;
        }
    }
    return out;
}

std::string vformat(const char *fmt, va_list args) {
    va_list copy;
    va_copy(copy, args);
    const int n = vsnprintf(nullptr, 0, fmt, copy);
    va_end(copy);
    std::string text(n > 0 ? size_t(n) + 1 : 1, '\0');
    vsnprintf(&text[0], text.size(), fmt, args);
    text.pop_back();
    return printable(text);
}

} // namespace

std::string format(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    return text;
}

void fail(luce_status code, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    throw Error(code, std::move(text));
}

std::string human_bytes(uint64_t n) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = double(n);
    int unit = 0;
    while (value >= 1024 && unit < 6) {
        value /= 1024;
        unit++;
    }
    return format(unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
}

void set_last_error(const char *message) noexcept {
    try {
        t_last_error = message;
    } catch (...) {
        t_last_error = "out of memory"; // it is short enough for the string itself to hold
    }
}

const char *last_error() {
    return t_last_error.c_str();
}

void set_log(luce_log_fn fn, void *user) {
    std::lock_guard<std::mutex> lock(g_log_mutex);
    g_log_fn = fn;
    g_log_user = user;
}

bool is_logged() {
    std::lock_guard<std::mutex> lock(g_log_mutex);
    return g_log_fn != nullptr;
}

void log(int level, const char *fmt, ...) {
    luce_log_fn fn;
    void *user;
    {
        std::lock_guard<std::mutex> lock(g_log_mutex);
        fn = g_log_fn;
        user = g_log_user;
    }
    if (fn == nullptr) {
        return;
    }
    va_list args;
    va_start(args, fmt);
    const std::string text = vformat(fmt, args);
    va_end(args);
    // It is called outside the lock, since a callback may log or set another one.
    fn(level, text.c_str(), user);
}

} // namespace luce
