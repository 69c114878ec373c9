// Reading and counting answers.
#include "client/bench/tally.h"

#include <algorithm>
#include <numeric>

#include "absl/status/status.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "inference/grpc_service.pb.h"

namespace awqd::bench {
namespace {

using google::protobuf::internal::WireFormatLite;

constexpr int64_t kNsPerUs = 1000;

constexpr uint32_t Tag(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

void CountDue(const Answer& answer, const grpc::Status& status, const ResponseFacts* facts,
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
  if (facts == nullptr) {
    ++tally.malformed;
    return;
  }
  tally.latency.Add(answer.done_ns - answer.due_ns);
  const v1::Execution& ran = facts->execution;
  if (ran.batch_requests() == 0) return;
  ++tally.executed;
  tally.batch_tokens += static_cast<double>(ran.batch_tokens());
  tally.batch_requests += static_cast<double>(ran.batch_requests());
  tally.queue.Add(ran.queue_us() * kNsPerUs);
  tally.compute.Add(ran.compute_us() * kNsPerUs);
}

}  // namespace

std::string CodeName(int code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

std::optional<ResponseFacts> ReadResponse(Protocol protocol, grpc::ByteBuffer& response) {
  // Walks the top level of the message.
  using Infer = inference::ModelInferResponse;
  const bool awqd = protocol == Protocol::kAwqd;
  const uint32_t output_tag = awqd ? Tag(v1::QuantizedMatmulResponse::kOutputFieldNumber)
                                   : Tag(Infer::kRawOutputContentsFieldNumber);
  grpc::ProtoBufferReader reader(&response);
  if (!reader.status().ok()) return std::nullopt;
  google::protobuf::io::CodedInputStream input(&reader);
  ResponseFacts facts;
  while (const uint32_t tag = input.ReadTag()) {
    uint32_t length = 0;
    std::string bytes;
    bool ok = true;
    if (tag == output_tag) {
      ok = input.ReadVarint32(&length) && input.Skip(static_cast<int>(length));
      facts.output_bytes = length;
    } else if (awqd && tag == Tag(v1::QuantizedMatmulResponse::kExecutionFieldNumber)) {
      ok = input.ReadVarint32(&length) && input.ReadString(&bytes, static_cast<int>(length)) &&
           facts.execution.ParseFromString(bytes);
    } else {
      ok = WireFormatLite::SkipField(&input, tag);
    }
    if (!ok) return std::nullopt;
  }
  if (!input.ConsumedEntireMessage()) return std::nullopt;
  return facts;
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
           const grpc::Status& status, const ResponseFacts* facts, Tally& tally) {
  if (window.Holds(answer.due_ns)) CountDue(answer, status, facts, tally);
  if (!status.ok() || facts == nullptr || !window.Holds(answer.done_ns)) return;
  ++tally.completed;
  if (absl::Nanoseconds(answer.done_ns - answer.due_ns) <= deadline) ++tally.good;
  tally.tokens += answer.tokens;
  tally.request_bytes += answer.request_bytes;
  tally.response_bytes += answer.response_bytes;
}

}  // namespace awqd::bench
