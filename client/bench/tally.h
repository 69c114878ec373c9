// Tally: reads and counts the answers to one load point. Histogram: their latencies.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/bench/plan.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/status.h"

namespace awqd::bench {

// gRPC's status codes are 0 (OK) to 16.
inline constexpr int kCodes = 17;

// "RESOURCE_EXHAUSTED"
std::string CodeName(int code);

// Nanoseconds of the monotonic clock since an arbitrary start.
inline int64_t NowNs() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Latencies in buckets that are at most 1/128 of their value wide. Values are nanoseconds from 0 to
// 2^41 (36 minutes); a value outside counts as the nearer end. Below 256 every value has its own
// bucket; from there each power of two has 128. Not thread-safe.
class Histogram {
 public:
  Histogram();

  void Add(int64_t value_ns);
  void Merge(const Histogram& other);

  int64_t count() const { return count_; }
  // 0 when empty. The largest value is exact.
  int64_t max_ns() const { return max_; }
  double mean_ns() const;
  // The least bucket edge that at least `share` (0 to 1) of the values do not pass, never more than
  // max_ns(); 0 when empty.
  int64_t QuantileNs(double share) const;

 private:
  std::vector<int64_t> buckets_;
  int64_t count_ = 0;
  int64_t max_ = 0;
  double sum_ = 0;
};

// Reads what ran from a QuantizedMatmulResponse or its like; a ModelInferResponse says nothing of
// it. nullopt when the bytes are not such a message. The tensor is skipped, not copied. `response`
// is left as it was.
std::optional<v1::Execution> ReadResponse(Protocol protocol, grpc::ByteBuffer& response);

// One answer, with what became known of it. Times are of NowNs().
struct Answer {
  int64_t due_ns = 0;   // when the request should have been sent: latency counts from here
  int64_t sent_ns = 0;  // when it was
  int64_t done_ns = 0;
  int64_t tokens = 0;
  int64_t request_bytes = 0;
  int64_t response_bytes = 0;
};

// Not thread-safe.
struct Tally {
  // Requests that were due in the window.
  Histogram latency;  // OK, from when it was due
  Histogram refused;  // RESOURCE_EXHAUSTED, from when it was sent
  Histogram lag;      // from due to sent, of every answer
  Histogram queue;    // as the server reports, OK
  Histogram compute;  // likewise
  std::array<int64_t, kCodes> answers = {};
  std::array<std::string, kCodes> first_message;
  int64_t malformed = 0;                        // OK, but not a response; not counted in `latency`
  int64_t executed = 0;                         // OK and says what ran
  double batch_tokens = 0, batch_requests = 0;  // sums over `executed`

  // Answers that came within the window, whenever they were due: the work that the server did.
  int64_t completed = 0;  // OK
  int64_t good = 0;       // and within the deadline
  int64_t tokens = 0;
  int64_t request_bytes = 0, response_bytes = 0;

  int64_t errors() const;  // answers with another code than OK
  void Merge(const Tally& other);
};

// The window that is measured: [from_ns, to_ns).
struct Window {
  int64_t from_ns = 0, to_ns = 0;
  bool Holds(int64_t at_ns) const { return from_ns <= at_ns && at_ns < to_ns; }
};

// `ran` is null when the status is not OK or the response is malformed.
void Count(const Window& window, absl::Duration deadline, const Answer& answer,
           const grpc::Status& status, const v1::Execution* ran, Tally& tally);

}  // namespace awqd::bench
