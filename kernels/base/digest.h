// Digests of bytes, which show that two processes have the same. They resist no attacker.
#pragma once

#include <cstddef>
#include <cstdint>

namespace awqd {

// XXH64 of these bytes.
uint64_t Xxh64(const void* data, size_t bytes, uint64_t seed = 0);

// Xxh64 of the Xxh64s, one after the other, of each 4 MiB of a weight's bytes. Reads them on several
// threads of its own.
uint64_t DigestOfWeight(const uint8_t* data, int64_t bytes);

}  // namespace awqd
