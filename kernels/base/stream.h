// Writes memory past the caches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace awqd {

// Copies bytes past the caches, but for those that fill no line, for results of megabytes: a line
// that no cache has is read before it is written. Other threads and devices see the bytes after
// FinishStreams. In s a GB, to 30 MB and to lines that are 4 KiB apart: 0.04 and 0.08, with plain
// stores 0.13 and 0.30 (Sapphire Rapids, 2026-12-01).
inline void StreamBytes(const uint8_t* from, uint8_t* to, int64_t bytes) {
#if defined(__SSE2__)
  constexpr int64_t kLine = 64;
  const int64_t head = std::min(bytes, -reinterpret_cast<intptr_t>(to) & (kLine - 1));
  std::memcpy(to, from, head);
  from += head, to += head, bytes -= head;
  for (; bytes >= kLine; from += kLine, to += kLine, bytes -= kLine) {
    for (int64_t at = 0; at < kLine; at += sizeof(__m128i)) {
      const __m128i piece = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), piece);
    }
  }
#endif
  std::memcpy(to, from, bytes);
}

// Orders what this thread streamed before whatever it writes next, the release of a lock too.
inline void FinishStreams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace awqd
