// Parses and prints the header traceparent.
#include "server/obs/trace_context.h"

#include <random>

#include "absl/strings/str_cat.h"

namespace awqd::obs {
namespace {

// Accepts lower-case hexadecimal digits alone, as the specification demands.
bool ParseHex(absl::string_view text, uint64_t* value) {
  *value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && (c < 'a' || c > 'f')) return false;
    *value = *value << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return true;
}

}  // namespace

std::string HexId(uint64_t id) { return absl::StrCat(absl::Hex(id, absl::kZeroPad16)); }

std::string TraceContext::trace_id() const {
  return valid() ? HexId(trace_high) + HexId(trace_low) : "";
}

std::string TraceContext::traceparent() const {
  return absl::StrCat("00-", trace_id(), "-", HexId(span), sampled ? "-01" : "-00");
}

TraceContext ContinueTrace(absl::string_view header) {
  constexpr size_t kLength = 55;  // of version 00; later versions may append "-..."
  uint64_t version = 0, flags = 0;
  TraceContext out;
  const bool parsed =
      header.size() >= kLength && header[2] == '-' && header[35] == '-' && header[52] == '-' &&
      ParseHex(header.substr(0, 2), &version) && ParseHex(header.substr(3, 16), &out.trace_high) &&
      ParseHex(header.substr(19, 16), &out.trace_low) &&
      ParseHex(header.substr(36, 16), &out.parent) && ParseHex(header.substr(53, 2), &flags);
  const bool ends_well = header.size() == kLength ||
                         (version > 0 && header.size() > kLength && header[kLength] == '-');
  if (!parsed || version == 0xff || !ends_well || !out.valid() || out.parent == 0) return {};
  out.sampled = (flags & 1) != 0;
  out.span = RandomId();
  return out;
}

TraceContext NewTrace() {
  return {.trace_high = RandomId(), .trace_low = RandomId(), .span = RandomId(), .sampled = true};
}

uint64_t RandomId() {
  thread_local std::mt19937_64 random{[] {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
  }()};
  for (;;) {
    if (const uint64_t id = random(); id != 0) return id;
  }
}

}  // namespace awqd::obs
