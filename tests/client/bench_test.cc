// The parts of awqctl bench: histogram, lists, arrivals, payloads, counting, reports.
#include "client/bench/bench.h"

#include <cmath>
#include <set>

#include "client/bench/load.h"
#include "client/bench/payload.h"
#include "client/bench/plan.h"
#include "client/bench/tally.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "inference/grpc_service.pb.h"
#include "nlohmann/json.hpp"

namespace awqd::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

grpc::ByteBuffer BufferOf(const std::string& bytes, size_t piece) {
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < bytes.size(); at += piece) slices.emplace_back(bytes.substr(at, piece));
  return grpc::ByteBuffer(slices.data(), slices.size());
}

// The request that a payload holds.
template <typename Request>
Request RequestOf(const Payload& payload) {
  grpc::ByteBuffer buffer = payload.request;
  grpc::Slice slice;
  EXPECT_TRUE(buffer.DumpToSingleSlice(&slice).ok());
  EXPECT_EQ(payload.request_bytes, static_cast<int64_t>(slice.size()));
  Request request;
  EXPECT_TRUE(request.ParseFromArray(slice.begin(), static_cast<int>(slice.size())));
  return request;
}

TEST(HistogramTest, QuantilesAreWithinOnePercentAndNeverLow) {
  Histogram histogram;
  for (int64_t i = 1; i <= 100000; ++i) histogram.Add(i * 1000);
  EXPECT_EQ(histogram.count(), 100000);
  EXPECT_EQ(histogram.max_ns(), 100000000);
  EXPECT_NEAR(histogram.mean_ns(), 50000500, 1);
  for (const double share : {0.001, 0.5, 0.9, 0.99, 0.999, 1.0}) {
    const double exact = share * 1e8;
    EXPECT_GE(histogram.QuantileNs(share), exact);
    EXPECT_LE(histogram.QuantileNs(share), exact * 1.008 + 1000);
  }
}

TEST(HistogramTest, SmallValuesAreExactAndOddOnesStayInside) {
  Histogram histogram;
  EXPECT_EQ(histogram.QuantileNs(0.5), 0);
  for (const int64_t value : {0, 3, 255}) histogram.Add(value);
  EXPECT_EQ(histogram.QuantileNs(0.5), 3);
  EXPECT_EQ(histogram.QuantileNs(1), 255);
  histogram.Add(-5);
  histogram.Add(int64_t{1} << 62);
  EXPECT_EQ(histogram.count(), 5);
  EXPECT_EQ(histogram.QuantileNs(0), 0);
  EXPECT_EQ(histogram.max_ns(), int64_t{1} << 41);
}

TEST(HistogramTest, MergeIsTheSumOfBoth) {
  Histogram a, b;
  a.Add(10);
  b.Add(1000000);
  a.Merge(b);
  EXPECT_EQ(a.count(), 2);
  EXPECT_EQ(a.QuantileNs(0.5), 10);
  EXPECT_EQ(a.max_ns(), 1000000);
}

TEST(PlanTest, ParsesMixes) {
  EXPECT_THAT(*ParseShares("1,16:3,a:b"),
              ElementsAre(Pair("1", 1.0), Pair("16", 3.0), Pair("a:b", 1.0)));
  const auto tokens = ParseTokens("0,16:2.5");
  ASSERT_TRUE(tokens.ok());
  EXPECT_EQ((*tokens)[1].tokens, 16);
  EXPECT_EQ((*tokens)[1].share, 2.5);
  const auto weight = ParseWeight("m/layers.0/q:4");
  ASSERT_TRUE(weight.ok());
  EXPECT_EQ(weight->model, "m");
  EXPECT_EQ(weight->weight, "layers.0/q");
  EXPECT_EQ(weight->share, 4);
}

TEST(PlanTest, ParsesSweeps) {
  EXPECT_THAT(*ParseSweep("1..8"), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(*ParseSweep("1..5,100"), ElementsAre(1, 2, 4, 5, 100));
  EXPECT_THAT(*ParseSweep("7..7"), ElementsAre(7));
}

TEST(PlanTest, SaysWhatItGot) {
  for (const char* bad : {"", "0", "-1", "x", "1..", "8..1", "1,,2", "nan", "1e300"}) {
    EXPECT_FALSE(ParseSweep(bad).ok()) << bad;
  }
  for (const char* bad : {"", "1,", "1:0", "1:-2", ":3", "1:inf"}) {
    EXPECT_FALSE(ParseTokens(bad).ok()) << bad;
  }
  EXPECT_FALSE(ParseTokens("-1").ok());
  EXPECT_FALSE(ParseTokens("99999999999").ok());
  for (const char* bad : {"", "m", "m/", "/w", "m/:2"}) EXPECT_FALSE(ParseWeight(bad).ok()) << bad;
  EXPECT_THAT(ParseWeight("mine").status().message(),
              HasSubstr("got 'mine', expected model/weight"));
}

TEST(ArrivalsTest, ConstantOnesInterleave) {
  Arrivals first(1000, false, 1, 0), second(1000, false, 1, 0.5);
  EXPECT_EQ(first.NextNs(), 1000000);
  EXPECT_EQ(first.NextNs(), 2000000);
  EXPECT_EQ(second.NextNs(), 500000);
}

TEST(ArrivalsTest, PoissonHasItsRateAndSpread) {
  Arrivals arrivals(1e6, true, 7, 0), again(1e6, true, 7, 0);
  constexpr int kCount = 100000;
  int64_t last = 0;
  double squares = 0;
  for (int i = 0; i < kCount; ++i) {
    const int64_t at = arrivals.NextNs();
    ASSERT_GE(at, last);
    ASSERT_EQ(at, again.NextNs());
    squares += std::pow(static_cast<double>(at - last) / 1000 - 1, 2);
    last = at;
  }
  // The mean of 1e5 gaps has a deviation of 0.3 %, the variance one of 0.9 %; the limits are five
  // deviations.
  EXPECT_NEAR(static_cast<double>(last) / 1000 / kCount, 1, 0.016);
  EXPECT_NEAR(squares / kCount, 1, 0.045);
}

TEST(PayloadsTest, AreWholeRequestsPickedByShare) {
  Plan plan;
  plan.weights = {{"m", "w", 1, 4, 8}};
  plan.tokens = {{1, 3}, {2, 1}};
  plan.path = v1::FUSED;
  const auto payloads = Payloads::Make(plan);
  ASSERT_TRUE(payloads.ok());
  ASSERT_EQ(payloads->all().size(), 2u);
  EXPECT_EQ(payloads->Pick(0).tokens, 1);
  EXPECT_EQ(payloads->Pick(0.74).tokens, 1);
  EXPECT_EQ(payloads->Pick(0.76).tokens, 2);
  EXPECT_EQ(payloads->Pick(1).tokens, 2);
  const auto request = RequestOf<v1::QuantizedMatmulRequest>(payloads->all()[1]);
  EXPECT_EQ(request.weight().weight(), "w");
  EXPECT_EQ(request.activations().raw().size(), 2u * 4 * 2);
  EXPECT_EQ(request.activations().shape(0), 2);
  EXPECT_EQ(request.path(), v1::FUSED);
}

TEST(PayloadsTest, SpeakTheInferenceProtocol) {
  Plan plan;
  plan.protocol = Protocol::kInference;
  plan.weights = {
      {"m", "w", 1, 4, 8}, {"m", "experts.*.up", 1, 4, 8, 5}, {"m", "mlp", 1, 4, 8, 0, true}};
  plan.tokens = {{3, 1}};
  plan.output_dtype = v1::FP32;
  plan.path = v1::FUSED;
  const auto payloads = Payloads::Make(plan);
  ASSERT_TRUE(payloads.ok()) << payloads.status();
  std::vector<inference::ModelInferRequest> requests;
  for (const Payload& payload : payloads->all()) {
    EXPECT_STREQ(payload.method, "/inference.GRPCInferenceService/ModelInfer");
    requests.push_back(RequestOf<inference::ModelInferRequest>(payload));
  }
  EXPECT_EQ(requests[0].model_name(), "m/w");
  ASSERT_EQ(requests[0].inputs_size(), 1);
  EXPECT_EQ(requests[0].inputs(0).datatype(), "FP16");
  EXPECT_THAT(requests[0].inputs(0).shape(), ::testing::ElementsAre(3, 4));
  EXPECT_EQ(requests[0].raw_input_contents(0).size(), 3u * 4 * 2);
  EXPECT_EQ(requests[0].parameters().at("output_dtype").string_param(), "FP32");
  EXPECT_EQ(requests[0].parameters().at("path").string_param(), "FUSED");
  EXPECT_EQ(requests[1].inputs(1).name(), "ids");
  EXPECT_EQ(requests[1].inputs(2).name(), "router_weights");
  EXPECT_EQ(requests[1].raw_input_contents(2).size(), 3u * 2 * 4);
  EXPECT_EQ(requests[2].model_name(), "m/mlp:gated_mlp");
  EXPECT_EQ(requests[2].parameters().at("activation_function").string_param(), "SILU");
  plan.protocol = Protocol::kAwqd;
  plan.weights.resize(1);
  const int64_t ours = Payloads::Make(plan)->all()[0].request_bytes;
  EXPECT_LT(std::abs(ours - payloads->all()[0].request_bytes), 64) << "equal payloads";
}

TEST(PayloadsTest, MixesExpertsAndMlps) {
  Plan plan;
  plan.weights = {{"m", "experts.*.up", 1, 4, 8, 5},
                  {"m", "mlp", 1, 4, 8, 0, true},
                  {"m", "experts.*", 1, 4, 8, 5, true}};
  plan.tokens = {{3, 1}};
  plan.top_k = 4;
  const auto payloads = Payloads::Make(plan);
  ASSERT_TRUE(payloads.ok()) << payloads.status();
  EXPECT_THAT(payloads->all()[0].method, ::testing::EndsWith("/GroupedQuantizedMatmul"));
  const auto request = RequestOf<v1::GatedMlpRequest>(payloads->all()[2]);
  EXPECT_EQ(request.mlp().path(), "experts.*");
  EXPECT_EQ(request.expert_ids().shape(1), 4);
  EXPECT_EQ(request.router_weights().raw().size(), 3u * 4 * 4);
  EXPECT_FALSE(RequestOf<v1::GatedMlpRequest>(payloads->all()[1]).has_expert_ids());
  plan.top_k = 6;
  EXPECT_THAT(Payloads::Make(plan).status().message(), HasSubstr("top_k: got 6, expected at most"));
}

TEST(RandomRoutingTest, ChoosesDifferentExpertsByWeightsThatSumToOne) {
  const auto routing = RandomRouting(50, 3, 8, 1);
  ASSERT_TRUE(routing.ok()) << routing.status();
  const auto* ids = reinterpret_cast<const int32_t*>(routing->expert_ids.bytes.data());
  const std::vector<float> weights = *routing->router_weights->ToFloats();
  std::set<int32_t> all;
  for (int token = 0; token < 50; ++token) {
    const std::set<int32_t> chosen(ids + token * 3, ids + token * 3 + 3);
    EXPECT_EQ(chosen.size(), 3u);
    all.insert(chosen.begin(), chosen.end());
    EXPECT_NEAR(weights[token * 3] + weights[token * 3 + 1] + weights[token * 3 + 2], 1, 1e-6);
  }
  EXPECT_EQ(*all.begin(), 0);
  EXPECT_EQ(*all.rbegin(), 7);
  EXPECT_EQ(RandomRouting(50, 3, 8, 1)->expert_ids.bytes, routing->expert_ids.bytes);
}

TEST(PayloadsTest, RefusesWhatNoMessageHolds) {
  Plan plan;
  plan.weights = {{"m", "w", 1, 4096, 8}};
  plan.tokens = {{1 << 20, 1}};
  EXPECT_THAT(Payloads::Make(plan).status().message(), HasSubstr("do not fit one request"));
  plan.weights.clear();
  EXPECT_FALSE(Payloads::Make(plan).ok());
}

TEST(ResponseTest, ReadsExecutionAcrossSlices) {
  v1::QuantizedMatmulResponse response;
  response.mutable_output()->set_raw(std::string(1000, 'x'));
  response.mutable_execution()->set_batch_tokens(17);
  response.set_request_id("id");
  for (const size_t piece : {1, 7, 100000}) {
    grpc::ByteBuffer buffer = BufferOf(response.SerializeAsString(), piece);
    const auto ran = ReadResponse(Protocol::kAwqd, buffer);
    ASSERT_TRUE(ran.has_value());
    EXPECT_EQ(ran->batch_tokens(), 17);
  }
}

TEST(ResponseTest, ReadsTheInferenceProtocol) {
  inference::ModelInferResponse response;
  response.set_model_name("m/w");
  response.add_outputs()->set_name("y");
  response.add_raw_output_contents(std::string(1000, 'x'));
  for (const size_t piece : {1, 7, 100000}) {
    grpc::ByteBuffer buffer = BufferOf(response.SerializeAsString(), piece);
    const auto ran = ReadResponse(Protocol::kInference, buffer);
    ASSERT_TRUE(ran.has_value());
    EXPECT_EQ(ran->batch_requests(), 0);
  }
  grpc::ByteBuffer noise = BufferOf("\xff\xff\xff\xff\xff\xff\xff", 2);
  EXPECT_FALSE(ReadResponse(Protocol::kInference, noise).has_value());
}

TEST(ResponseTest, RefusesWhatDoesNotParse) {
  const std::string whole = [] {
    v1::QuantizedMatmulResponse response;
    response.mutable_output()->set_raw("abcdef");
    response.mutable_execution()->set_kernel("k");
    return response.SerializeAsString();
  }();
  for (size_t size = 1; size < whole.size(); ++size) {
    grpc::ByteBuffer buffer = BufferOf(whole.substr(0, size), 3);
    const auto ran = ReadResponse(Protocol::kAwqd, buffer);
    // A cut between two fields leaves a complete message.
    EXPECT_EQ(ran.has_value(),
              v1::QuantizedMatmulResponse().ParseFromString(whole.substr(0, size)));
  }
  grpc::ByteBuffer noise = BufferOf("\xff\xff\xff\xff\xff\xff\xff", 2);
  EXPECT_FALSE(ReadResponse(Protocol::kAwqd, noise).has_value());
}

// An answer that was due, sent and done at these times.
Answer At(int64_t due_ns, int64_t sent_ns, int64_t done_ns) {
  return {due_ns, sent_ns, done_ns, 3, 100, 50};
}

TEST(TallyTest, CountsLatencyByWhenDueAndThroughputByWhenDone) {
  const Window window{1000, 2000};
  v1::Execution ran;
  ran.set_batch_requests(2);
  ran.set_batch_tokens(6);
  Tally tally;
  Count(window, absl::Nanoseconds(300), At(500, 500, 1100), grpc::Status(), &ran, tally);
  EXPECT_EQ(tally.latency.count(), 0) << "due in the warm-up";
  EXPECT_EQ(tally.completed, 1) << "done in the window";
  EXPECT_EQ(tally.good, 0) << "later than the deadline";
  Count(window, absl::Nanoseconds(300), At(1500, 1600, 1700), grpc::Status(), &ran, tally);
  EXPECT_EQ(tally.latency.max_ns(), 200) << "from when it was due, not sent";
  EXPECT_EQ(tally.lag.max_ns(), 100);
  EXPECT_EQ(tally.good, 1);
  Count(window, absl::Nanoseconds(300), At(1900, 1900, 2500), grpc::Status(), &ran, tally);
  EXPECT_EQ(tally.latency.count(), 2) << "due in the window, done after it";
  EXPECT_EQ(tally.completed, 2);
  EXPECT_EQ(tally.tokens, 6);
  EXPECT_EQ(tally.request_bytes + tally.response_bytes, 300);
  EXPECT_EQ(tally.batch_tokens / static_cast<double>(tally.executed), 6);
}

TEST(TallyTest, CountsErrorsByCode) {
  const Window window{0, 1000};
  Tally tally, other;
  const grpc::Status full(grpc::RESOURCE_EXHAUSTED, "queue full");
  Count(window, absl::InfiniteDuration(), At(100, 200, 230), full, nullptr, tally);
  Count(window, absl::InfiniteDuration(), At(100, 100, 110), grpc::Status(), nullptr, tally);
  Count(window, absl::InfiniteDuration(), At(5, 5, 9), {grpc::INTERNAL, "bug"}, nullptr, other);
  tally.Merge(other);
  EXPECT_EQ(tally.errors(), 2);
  EXPECT_EQ(tally.refused.max_ns(), 30) << "from when it was sent";
  EXPECT_EQ(tally.first_message[grpc::RESOURCE_EXHAUSTED], "queue full");
  EXPECT_EQ(tally.first_message[grpc::INTERNAL], "bug");
  EXPECT_EQ(tally.malformed, 1);
  EXPECT_EQ(tally.latency.count(), 0);
  EXPECT_EQ(tally.completed, 0);
}

std::vector<PointResult> TwoPoints() {
  std::vector<PointResult> results(2);
  for (int i = 0; i < 2; ++i) {
    results[i].point.concurrency = i + 1;
    results[i].load.seconds = 2;
    for (int j = 0; j < 100; ++j) results[i].load.tally.latency.Add((j + 1) * 10000 * (i + 1));
    results[i].load.tally.answers[0] = 100;
    results[i].load.tally.completed = 100 * (i + 1);
  }
  return results;
}

TEST(ReportTest, JsonHasTheFigures) {
  Plan plan;
  plan.weights = {{"m", "w", 1, 4, 8}};
  std::vector<PointResult> results = TwoPoints();
  results[1].load.tally.answers[8] = 5;
  results[1].load.tally.first_message[8] = "full \xff";
  const auto json = nlohmann::json::parse(ToJson("here:1", plan, results));
  EXPECT_EQ(json["address"], "here:1");
  EXPECT_EQ(json["points"][0]["requests_per_s"], 50);
  EXPECT_EQ(json["points"][0]["latency"]["max_us"], 1000);
  EXPECT_NEAR(json["points"][0]["latency"]["p99_us"], 990, 8);
  EXPECT_EQ(json["points"][1]["errors"]["RESOURCE_EXHAUSTED"]["count"], 5);
  EXPECT_TRUE(json["plan"]["deadline_ms"].is_null());
}

TEST(ReportTest, SvgHasALineForEachQuantileAndAMarkForEachPoint) {
  const auto count = [](const std::string& text, const std::string& word) {
    int found = 0;
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
      ++found;
    return found;
  };
  const std::string svg = ToSvg("a < b & \"c\"", TwoPoints());
  EXPECT_THAT(svg, ::testing::StartsWith("<svg "));
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; &quot;c&quot;"));
  EXPECT_EQ(count(svg, "<polyline"), 3);
  EXPECT_EQ(count(svg, "<circle"), 6);
  EXPECT_EQ(count(svg, "nan"), 0);
  const std::string empty =
      ToSvg("nothing", std::vector<PointResult>(1, PointResult{{1}, {{}, 1}}));
  EXPECT_EQ(count(empty, "<circle"), 0);
  EXPECT_EQ(count(empty, "nan") + count(empty, "inf"), 0);
}

}  // namespace
}  // namespace awqd::bench
