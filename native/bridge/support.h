// What the sources of the bridge share: ownership of what goes out, errors, and guards in front of recursive parsers.
#pragma once

#include "bridge.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace lsrv {

inline char * copy_text(const std::string & text) {
    char * out = (char *) malloc(text.size() + 1);
    if (out == nullptr) {
        throw std::bad_alloc();
    }
    memcpy(out, text.data(), text.size());
    out[text.size()] = '\0';
    return out;
}

template <typename T>
T * copy_array(const std::vector<T> & items) {
    T * out = (T *) malloc(std::max<size_t>(1, items.size()) * sizeof(T));
    if (out == nullptr) {
        throw std::bad_alloc();
    }
    if (!items.empty()) {
        memcpy(out, items.data(), items.size() * sizeof(T));
    }
    return out;
}

inline int32_t fail(char ** err, const char * text) noexcept {
    if (err != nullptr) {
        *err = strdup(text);
    }
    return LSRV_ERR;
}

// Runs a body that throws or returns; every exception becomes a status with its text.
template <typename F>
int32_t guarded(char ** err, F && body) noexcept {
    try {
        body();
        return LSRV_OK;
    } catch (const std::exception & e) {
        return fail(err, e.what());
    } catch (...) {
        return fail(err, "unknown native error");
    }
}

[[noreturn]] inline void refuse(const std::string & text) {
    throw std::invalid_argument(text);
}

} // namespace lsrv
