// Whether this process may use AMX.
#pragma once

namespace awqd {

// Whether the machine has AMX-INT8 and the kernel lets this process use its registers, for which it
// is asked by the first call. Of x86-64. Thread-safe.
bool HasAmx();

}  // namespace awqd
