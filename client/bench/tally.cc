// Reading and counting answers; log-linear buckets.
#include "client/bench/tally.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "absl/status/status.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace awqd::bench {
namespace {

using google::protobuf::internal::WireFormatLite;

constexpr int64_t kNsPerUs = 1000;

constexpr int kSubBits = 7;
constexpr int64_t kLinear = int64_t{2} << kSubBits;
constexpr int64_t kMax = int64_t{1} << 41;

size_t IndexOf(int64_t value) {
  if (value < kLinear) return static_cast<size_t>(value);
  const int shift = std::bit_width(static_cast<uint64_t>(value)) - (kSubBits + 1);
  return (static_cast<size_t>(shift) << kSubBits) + static_cast<size_t>(value >> shift);
}

// The largest value of a bucket.
int64_t EdgeOf(size_t index) {
  if (index < static_cast<size_t>(kLinear)) return static_cast<int64_t>(index);
  const int shift = static_cast<int>(index >> kSubBits) - 1;
  const int64_t step = static_cast<int64_t>(index) - (int64_t{shift} << kSubBits);
  return ((step + 1) << shift) - 1;
}

void CountDue(const Answer& answer, const grpc::Status& status, const v1::Execution* ran,
              Tally& tally) {
  const int code = std::clamp(static_cast<int>(status.error_code()), 0, kCodes - 1);
  ++tally.answers[code];
  tally.lag.Add(answer.sent_ns - answer.due_ns);
  if (!status.ok()) {
    std::string& message = tally.first_message[code];
    if (message.empty()) message = status.error_message();
    if (code == grpc::RESOURCE_EXHAUSTED) tally.refused.Add(answer.done_ns - answer.sent_ns);
    return;
  }
  if (ran == nullptr) {
    ++tally.malformed;
    return;
  }
  tally.latency.Add(answer.done_ns - answer.due_ns);
  if (ran->batch_requests() == 0) return;
  ++tally.executed;
  tally.batch_tokens += static_cast<double>(ran->batch_tokens());
  tally.batch_requests += static_cast<double>(ran->batch_requests());
  tally.queue.Add(ran->queue_us() * kNsPerUs);
  tally.compute.Add(ran->compute_us() * kNsPerUs);
}

}  // namespace

Histogram::Histogram() : buckets_(IndexOf(kMax) + 1, 0) {}

void Histogram::Add(int64_t value_ns) {
  const int64_t value = std::clamp(value_ns, int64_t{0}, kMax);
  ++buckets_[IndexOf(value)];
  ++count_;
  max_ = std::max(max_, value);
  sum_ += static_cast<double>(value);
}

void Histogram::Merge(const Histogram& other) {
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
}

double Histogram::mean_ns() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }

int64_t Histogram::QuantileNs(double share) const {
  if (count_ == 0) return 0;
  const auto wanted =
      std::max(int64_t{1}, static_cast<int64_t>(std::ceil(share * static_cast<double>(count_))));
  int64_t seen = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    seen += buckets_[i];
    if (seen >= wanted) return std::min(EdgeOf(i), max_);
  }
  return max_;
}

std::string CodeName(int code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

std::optional<v1::Execution> ReadResponse(Protocol protocol, grpc::ByteBuffer& response) {
  // Walks the top level of the message.
  constexpr uint32_t kExecution =
      WireFormatLite::MakeTag(v1::QuantizedMatmulResponse::kExecutionFieldNumber,
                              WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  grpc::ProtoBufferReader reader(&response);
  if (!reader.status().ok()) return std::nullopt;
  google::protobuf::io::CodedInputStream input(&reader);
  v1::Execution ran;
  while (const uint32_t tag = input.ReadTag()) {
    uint32_t length = 0;
    std::string bytes;
    bool ok = true;
    if (protocol == Protocol::kAwqd && tag == kExecution) {
      ok = input.ReadVarint32(&length) && input.ReadString(&bytes, static_cast<int>(length)) &&
           ran.ParseFromString(bytes);
    } else {
      ok = WireFormatLite::SkipField(&input, tag);
    }
    if (!ok) return std::nullopt;
  }
  if (!input.ConsumedEntireMessage()) return std::nullopt;
  return ran;
}

int64_t Tally::errors() const {
  return std::accumulate(answers.begin() + 1, answers.end(), int64_t{0});
}

void Tally::Merge(const Tally& other) {
  latency.Merge(other.latency);
  refused.Merge(other.refused);
  lag.Merge(other.lag);
  queue.Merge(other.queue);
  compute.Merge(other.compute);
  for (int code = 0; code < kCodes; ++code) {
    answers[code] += other.answers[code];
    if (first_message[code].empty()) first_message[code] = other.first_message[code];
  }
  malformed += other.malformed;
  executed += other.executed;
  batch_tokens += other.batch_tokens;
  batch_requests += other.batch_requests;
  completed += other.completed;
  good += other.good;
  tokens += other.tokens;
  request_bytes += other.request_bytes;
  response_bytes += other.response_bytes;
}

void Count(const Window& window, absl::Duration deadline, const Answer& answer,
           const grpc::Status& status, const v1::Execution* ran, Tally& tally) {
  if (window.Holds(answer.due_ns)) CountDue(answer, status, ran, tally);
  if (!status.ok() || ran == nullptr || !window.Holds(answer.done_ns)) return;
  ++tally.completed;
  if (absl::Nanoseconds(answer.done_ns - answer.due_ns) <= deadline) ++tally.good;
  tally.tokens += answer.tokens;
  tally.request_bytes += answer.request_bytes;
  tally.response_bytes += answer.response_bytes;
}

}  // namespace awqd::bench
