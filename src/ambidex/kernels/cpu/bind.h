// What every file of bindings needs. Tensors cross as addresses: the Python wrapper has checked
// shape, stride, type and owner.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>

#include "table.h"

namespace ambidex {

namespace nb = nanobind;
using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

template <class Args>
void submit(Context& context, Kernel<Args> kernel, const Args& args, size_t shared_bytes = 0) {
    nb::gil_scoped_release release;
    context.submit(kernel, args, shared_bytes);
}

}  // namespace ambidex
