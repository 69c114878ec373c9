// TraceContext: the trace that a call belongs to, after W3C's header traceparent; SpanRef: a link
// to a span.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace awqd::obs {

// Names a span of a trace, for spans that link to it.
struct SpanRef {
  uint64_t trace_high = 0, trace_low = 0;
  uint64_t id = 0;  // 0: none; the call is not traced

  explicit operator bool() const { return id != 0; }
  friend bool operator==(const SpanRef&, const SpanRef&) = default;
};

// Null: no spans.
using SpanRefs = std::shared_ptr<const std::vector<SpanRef>>;

// The largest number of links that one span has.
inline constexpr size_t kMaxLinks = 32;

struct TraceContext {
  // 128 bits; both 0: the call has no trace.
  uint64_t trace_high = 0, trace_low = 0;
  uint64_t parent = 0;  // the caller's span; 0: the trace begins here
  uint64_t span = 0;    // the call's own
  bool sampled = false;

  bool valid() const { return trace_high != 0 || trace_low != 0; }
  // The call's own span; none if the call is not sampled.
  SpanRef ref() const { return sampled ? SpanRef{trace_high, trace_low, span} : SpanRef(); }
  std::string trace_id() const;  // 32 hexadecimal digits; "" without a trace
  // "00-<trace>-<the call's span>-01": the header for calls that continue this trace.
  std::string traceparent() const;
};

// Continues the trace of a call's header, which also says whether it is sampled. The result is not
// valid() when `header` breaks the grammar of https://www.w3.org/TR/trace-context.
TraceContext ContinueTrace(absl::string_view header);

// Starts a sampled trace.
TraceContext NewTrace();

// A random 64-bit number that is not 0. Thread-safe.
uint64_t RandomId();

// 16 hexadecimal digits.
std::string HexId(uint64_t id);

}  // namespace awqd::obs
