// TraceContext: which trace a call belongs to, as W3C's header traceparent says it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "server/obs/span_ref.h"

namespace awqd::obs {

struct TraceContext {
  // 128 bits; both 0: the call has no trace.
  uint64_t trace_high = 0, trace_low = 0;
  uint64_t parent = 0;  // the caller's span; 0: the trace begins here
  uint64_t span = 0;    // the call's own
  bool sampled = false;

  bool valid() const { return trace_high != 0 || trace_low != 0; }
  // The call's own span; none where it is not sampled.
  SpanRef ref() const { return sampled ? SpanRef{trace_high, trace_low, span} : SpanRef(); }
  std::string trace_id() const;  // 32 hexadecimal digits; "" without a trace
  // "00-<trace>-<the call's span>-01": what others continue from.
  std::string traceparent() const;
};

// Of a call that carries `header`: the trace goes on, and whether it is sampled is the caller's
// word. Not valid when the header is not as https://www.w3.org/TR/trace-context says.
TraceContext ContinueTrace(absl::string_view header);

// A trace that begins here, sampled.
TraceContext NewTrace();

// Never 0; unlike all others, for all that is likely. Thread-safe.
uint64_t RandomId();

// 16 hexadecimal digits.
std::string HexId(uint64_t id);

}  // namespace awqd::obs
