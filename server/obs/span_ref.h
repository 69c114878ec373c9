// SpanRef: names a span of a trace, for whoever links to it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace awqd::obs {

struct SpanRef {
  uint64_t trace_high = 0, trace_low = 0;
  uint64_t id = 0;  // 0: none, of a call that is not traced

  explicit operator bool() const { return id != 0; }
  friend bool operator==(const SpanRef&, const SpanRef&) = default;
};

// Null: none.
using SpanRefs = std::shared_ptr<const std::vector<SpanRef>>;

// A span links to so many others at most.
inline constexpr size_t kMaxLinks = 32;

}  // namespace awqd::obs
