// The calls that have a line in the log or a trace, and the contents of both.
#include "server/obs/call_recorder.h"

#include <fstream>
#include <future>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace awqd::obs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kParent[] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceContext, ContinuesTheCallersTrace) {
  const TraceContext context = ContinueTrace(kParent);
  EXPECT_EQ(context.trace_id(), "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(HexId(context.parent), "b7ad6b7169203331");
  EXPECT_TRUE(context.sampled);
  EXPECT_EQ(context.traceparent(),
            absl::StrCat("00-0af7651916cd43dd8448eb211c80319c-", HexId(context.span), "-01"));
  EXPECT_NE(context.span, context.parent);
  EXPECT_FALSE(ContinueTrace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00").sampled);
  // A later version may have more fields, which are ignored.
  EXPECT_TRUE(
      ContinueTrace("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what").valid());
}

TEST(TraceContext, RefusesWhatIsNoTraceparent) {
  for (const std::string& header :
       {std::string(), std::string("x"), std::string(55, '0'), std::string(kParent) + "x",
        std::string(kParent) + "-x",
        std::string("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        std::string("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01"),
        std::string("00-00000000000000000000000000000000-b7ad6b7169203331-01"),
        std::string("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01"),
        std::string("00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01"),
        std::string("00-0af7651916cd43dd8448eb211c8031\n9-b7ad6b7169203331-01")}) {
    EXPECT_FALSE(ContinueTrace(header).valid()) << header;
  }
}

TEST(TraceContext, BeginsTracesThatAreAllDifferent) {
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) ids.insert(NewTrace().trace_id());
  EXPECT_EQ(ids.size(), 1000u);
}

constexpr char kMethod[] = "awqd.v1.QuantizedInference/QuantizedMatmul";
constexpr char kCheck[] = "grpc.health.v1.Health/Check";
constexpr char kWatch[] = "grpc.health.v1.Health/Watch";
constexpr absl::Duration kFast = absl::Milliseconds(1);
const absl::Time kNow = absl::FromUnixSeconds(1000);

TEST(AccessLog, ModesSayWhichCallsHaveALine) {
  struct Case {
    AccessLogMode mode;
    bool good, failed, slow;
  };
  for (const Case& c : {Case{AccessLogMode::kOff, false, false, false},
                        Case{AccessLogMode::kSlow, false, false, true},
                        Case{AccessLogMode::kSampled, true, true, true},
                        Case{AccessLogMode::kAll, true, true, true}}) {
    AccessLog log({.mode = c.mode});
    EXPECT_EQ(log.Wants(kMethod, absl::StatusCode::kOk, kFast, kNow).wanted, c.good);
    EXPECT_EQ(log.Wants(kMethod, absl::StatusCode::kNotFound, kFast, kNow).wanted, c.failed);
    EXPECT_EQ(log.Wants(kMethod, absl::StatusCode::kOk, absl::Seconds(1), kNow).wanted, c.slow);
  }
}

TEST(AccessLog, BoundsTheLinesOfASecondAndCountsTheRest) {
  AccessLog log({.mode = AccessLogMode::kSampled, .lines_per_s = 2});
  int lines = 0;
  for (int i = 0; i < 1000; ++i) {
    if (log.Wants(kMethod, absl::StatusCode::kOk, kFast, kNow).wanted) ++lines;
  }
  EXPECT_EQ(lines, 2);
  const AccessLog::Line failed = log.Wants(kMethod, absl::StatusCode::kInternal, kFast, kNow);
  EXPECT_TRUE(failed.wanted) << "good ones leave room for those that failed";
  EXPECT_EQ(failed.skipped, 0);
  const AccessLog::Line next =
      log.Wants(kMethod, absl::StatusCode::kOk, kFast, kNow + absl::Seconds(1));
  EXPECT_TRUE(next.wanted);
  EXPECT_EQ(next.skipped, 998);
  EXPECT_EQ(log.Wants(kMethod, absl::StatusCode::kOk, kFast, kNow + absl::Seconds(2)).skipped, 0);
}

TEST(AccessLog, AllIsNotBounded) {
  AccessLog log({.mode = AccessLogMode::kAll, .lines_per_s = 2});
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(log.Wants(kMethod, absl::StatusCode::kOk, kFast, kNow).wanted);
  }
}

TEST(AccessLog, ProbesHaveALineWhenTheyFail) {
  using absl::StatusCode;
  AccessLog log({.mode = AccessLogMode::kSampled, .lines_per_s = 2});
  EXPECT_FALSE(log.Wants(kCheck, StatusCode::kOk, kFast, kNow).wanted);
  EXPECT_FALSE(log.Wants(kWatch, StatusCode::kCancelled, absl::ZeroDuration(), kNow).wanted);
  EXPECT_EQ(log.Wants(kMethod, StatusCode::kOk, kFast, kNow).skipped, 0) << "none was left out";
  const AccessLog::Line refused = log.Wants(kCheck, StatusCode::kUnauthenticated, kFast, kNow);
  EXPECT_TRUE(refused.wanted);
  const AccessLog::Line drained =
      log.Wants(kWatch, StatusCode::kUnavailable, absl::ZeroDuration(), kNow);
  EXPECT_TRUE(drained.wanted);
  AccessLog all({.mode = AccessLogMode::kAll});
  EXPECT_TRUE(all.Wants(kCheck, StatusCode::kOk, kFast, kNow).wanted);
}

// 1 ms of staging, 2 of waiting, 30 of computing, 4 of encoding, 5 of sending.
CallRecord Record() {
  CallRecord record = {.method = kMethod,
                       .peer = "ipv4:127.0.0.1:5",
                       .identity = "ann\nforged",
                       .trace = ContinueTrace(kParent),
                       .code = absl::StatusCode::kOk,
                       .began = kNow,
                       .answered = kNow + absl::Milliseconds(37),
                       .ended = kNow + absl::Milliseconds(42),
                       .received_bytes = 100,
                       .sent_bytes = 200};
  record.sum = {.request_id = "id\nforged",
                .model = "m",
                .weight = "layer",
                .kernel = "cpu/dense",
                .requests = 1,
                .tokens = 3,
                .queue_us = 2000,
                .compute_us = 30000,
                .batch = {.id = 5, .tokens = 9, .requests = 2},
                .timestamps = {kNow, kNow + absl::Milliseconds(1), kNow + absl::Milliseconds(37)}};
  return record;
}

std::string Logged(const CallRecord& record, const AccessLog::Line& line, LogFormat format) {
  ::testing::internal::CaptureStderr();
  SetUpLogging(LogLevel::kInfo, format);
  AccessLog(AccessLogOptions()).Write(record, line);
  EXPECT_TRUE(FlushLog(absl::Seconds(20)));
  return ::testing::internal::GetCapturedStderr();
}

TEST(AccessLog, ALineHasEverything) {
  const nlohmann::json line =
      nlohmann::json::parse(Logged(Record(), {.wanted = true, .skipped = 9}, LogFormat::kJson));
  EXPECT_EQ(line["message"], "call");
  EXPECT_EQ(line["level"], "info");
  EXPECT_EQ(line["method"], "awqd.v1.QuantizedInference/QuantizedMatmul");
  EXPECT_EQ(line["code"], "OK");
  EXPECT_EQ(line["peer"], "ipv4:127.0.0.1:5");
  EXPECT_EQ(line["identity"], "ann\\nforged");
  EXPECT_EQ(line["request_id"], "id\\nforged");
  EXPECT_EQ(line["trace"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(line["model"], "m");
  EXPECT_EQ(line["weight"], "layer");
  EXPECT_EQ(line["tokens"], 3);
  EXPECT_EQ(line["queue_us"], 2000);
  EXPECT_EQ(line["compute_us"], 30000);
  EXPECT_EQ(line["total_us"], 42000);
  EXPECT_EQ(line["bytes_in"], 100);
  EXPECT_EQ(line["bytes_out"], 200);
  EXPECT_EQ(line["skipped"], 9);
  EXPECT_FALSE(line.contains("step"));
}

TEST(AccessLog, ASlowCallNamesTheStepThatTookIt) {
  const AccessLog::Line slow = {.wanted = true, .slow = true};
  EXPECT_THAT(Logged(Record(), slow, LogFormat::kText), HasSubstr(" W "));
  EXPECT_THAT(Logged(Record(), slow, LogFormat::kText), HasSubstr("slow call method="));
  EXPECT_THAT(Logged(Record(), slow, LogFormat::kText), HasSubstr("step=compute"));
  CallRecord slow_reader = Record();
  slow_reader.ended += absl::Seconds(1);
  EXPECT_THAT(Logged(slow_reader, slow, LogFormat::kText), HasSubstr("step=send"));
  CallRecord never_ran = Record();
  never_ran.sum.compute_us = never_ran.sum.queue_us = 0;
  EXPECT_THAT(Logged(never_ran, slow, LogFormat::kText), HasSubstr("step=queue"));
}

TEST(AccessLog, OnlyACallOfOneRequestThatWaitedForADeviceMayBeSlow) {
  CallAnnotations one;
  const RequestLog request = {
      .timestamps = {kNow, kNow + absl::Milliseconds(1), kNow + absl::Seconds(2)}};
  one.AddRequest(request);
  EXPECT_EQ(one.waited(), absl::Seconds(2));
  CallAnnotations stream;
  EXPECT_EQ(stream.waited(), absl::ZeroDuration()) << "the load of a model, a watch";
  stream.AddRequest(request);
  stream.AddRequest(request);
  EXPECT_EQ(stream.waited(), absl::ZeroDuration()) << "it stays open as long as its client wants";
  CallAnnotations refused;
  refused.AddRequest({.timestamps = {.begun = kNow, .settled = kNow + absl::Seconds(2)}});
  EXPECT_EQ(refused.waited(), absl::ZeroDuration());
  AccessLog log({.slow = absl::ZeroDuration()});
  EXPECT_FALSE(log.Wants(kMethod, absl::StatusCode::kOk, stream.waited(), kNow).slow);
  EXPECT_TRUE(log.Wants(kMethod, absl::StatusCode::kOk, one.waited(), kNow).slow);
}

std::vector<std::string> Names(const std::vector<Span>& spans) {
  std::vector<std::string> out;
  for (const Span& span : spans) out.push_back(span.name);
  return out;
}

TEST(Spans, AreTheCallAndItsSteps) {
  const CallRecord record = Record();
  const std::vector<Span> spans = MakeSpans(record);
  EXPECT_THAT(Names(spans), ElementsAre("awqd.v1.QuantizedInference/QuantizedMatmul", "stage",
                                        "queue", "compute", "answer", "send"));
  EXPECT_EQ(spans[0].id, record.trace.span);
  EXPECT_EQ(HexId(spans[0].parent), "b7ad6b7169203331");
  for (size_t i = 1; i < spans.size(); ++i) {
    EXPECT_EQ(spans[i].parent, spans[0].id);
    EXPECT_LE(spans[i].begin, spans[i].end);
    if (i > 1) {
      EXPECT_EQ(spans[i].begin, spans[i - 1].end) << "nothing between two steps";
    }
  }
  EXPECT_EQ(spans[3].end - spans[3].begin, absl::Milliseconds(30));
  CallRecord stream = Record();
  stream.sum.requests = 7;
  EXPECT_THAT(Names(MakeSpans(stream)),
              ElementsAre("awqd.v1.QuantizedInference/QuantizedMatmul", "send"));
}

int64_t NumberOf(const Span& span, absl::string_view name) {
  for (const auto& [key, value] : span.numbers) {
    if (key == name) return value;
  }
  return -1;
}

TEST(Spans, ComputeLinksToTheOtherCallsOfItsBatch) {
  CallRecord record = Record();
  const SpanRef other = {7, 8, 9};
  record.sum.batch.calls =
      std::make_shared<const std::vector<SpanRef>>(std::vector{record.trace.ref(), other});
  const std::vector<Span> spans = MakeSpans(record);
  ASSERT_EQ(spans[3].name, "compute");
  EXPECT_THAT(spans[3].links, ElementsAre(other)) << "not to itself";
  EXPECT_EQ(NumberOf(spans[3], "awqd.batch_id"), 5);
  EXPECT_EQ(NumberOf(spans[3], "awqd.batch_requests"), 2);
  EXPECT_EQ(NumberOf(spans[3], "awqd.batch_tokens"), 9);
  for (const size_t step : {0, 1, 2, 4, 5}) EXPECT_THAT(spans[step].links, IsEmpty());
  const nlohmann::json json = nlohmann::json::parse(SpanJson(spans[3]));
  EXPECT_EQ(json["links"].dump(),
            R"([{"spanId":"0000000000000009","traceId":"00000000000000070000000000000008"}])");
}

TEST(Spans, LinksAreBounded) {
  CallRecord record = Record();
  std::vector<SpanRef> calls;
  for (uint64_t i = 1; i <= kMaxLinks + 1; ++i) calls.push_back({1, 2, i});
  record.sum.batch.calls = std::make_shared<const std::vector<SpanRef>>(calls);
  EXPECT_EQ(MakeSpans(record)[3].links.size(), kMaxLinks);
}

// Accepts spans, or fails, or waits until it is released.
class Collector : public SpanExporter {
 public:
  absl::Status Export(const std::vector<Span>& spans) override {
    if (gate.valid()) gate.wait();
    if (failing) return absl::UnavailableError("no collector");
    taken += static_cast<int64_t>(spans.size());
    return absl::OkStatus();
  }
  std::shared_future<void> gate;
  std::atomic<bool> failing{false};
  std::atomic<int64_t> taken{0};
};

TEST(Tracer, SamplesByShareAndByTheCallersWord) {
  Tracer all(1, std::make_unique<Collector>()), none(0, std::make_unique<Collector>());
  Tracer some(0.25, std::make_unique<Collector>());
  EXPECT_TRUE(all.Begin("").sampled);
  EXPECT_FALSE(none.Begin("").valid());
  EXPECT_TRUE(none.Begin(kParent).sampled);
  EXPECT_FALSE(all.Begin("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00").sampled);
  int sampled = 0;
  for (int i = 0; i < 10000; ++i) sampled += some.Begin("").sampled;
  EXPECT_NEAR(sampled, 2500, 300);  // seven standard deviations
}

TEST(Tracer, ExportsAllThatWaitsWhenItEnds) {
  struct Forward : SpanExporter {
    explicit Forward(std::atomic<int64_t>* taken) : taken(taken) {}
    absl::Status Export(const std::vector<Span>& spans) override {
      *taken += static_cast<int64_t>(spans.size());
      return absl::OkStatus();
    }
    std::atomic<int64_t>* const taken;
  };
  std::atomic<int64_t> taken{0};
  {
    Tracer tracer(1, std::make_unique<Forward>(&taken));
    for (int i = 0; i < 100; ++i) tracer.End(Record());
  }
  EXPECT_EQ(taken, 600);
}

TEST(Tracer, IsNeverInTheWay) {
  std::promise<void> go;
  auto owned = std::make_unique<Collector>();
  owned->gate = go.get_future().share();
  Tracer tracer(1, std::move(owned));
  const absl::Time begin = absl::Now();
  constexpr int kCalls = 3 * static_cast<int>(Tracer::kQueue);
  for (int i = 0; i < kCalls; ++i) tracer.End(Record());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10)) << "the collector hangs";
  // At most one batch is being exported and one waits.
  EXPECT_GE(tracer.dropped_spans(), 6 * static_cast<int64_t>(Tracer::kQueue));
  go.set_value();
}

TEST(Tracer, CountsWhatTheCollectorDoesNotTake) {
  auto owned = std::make_unique<Collector>();
  Collector* const collector = owned.get();
  collector->failing = true;
  Tracer tracer(1, std::move(owned));
  tracer.End(Record());
  while (tracer.dropped_spans() == 0) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(tracer.dropped_spans(), 6);
  collector->failing = false;
  tracer.End(Record());
  while (tracer.exported_spans() == 0) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(tracer.exported_spans(), 6);
}

TEST(Spans, AreALineEachInAFile) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/awqd_spans_", ::getpid());
  {
    auto exporter = OpenSpanFile(path);
    ASSERT_TRUE(exporter.ok()) << exporter.status();
    ASSERT_TRUE((*exporter)->Export(MakeSpans(Record())).ok());
  }
  std::ifstream file(path);
  const std::vector<std::string> lines = absl::StrSplit(
      std::string(std::istreambuf_iterator<char>(file), {}), '\n', absl::SkipEmpty());
  ASSERT_EQ(lines.size(), 6u);
  const nlohmann::json call = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(call["traceId"], "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(call["parentSpanId"], "b7ad6b7169203331");
  EXPECT_EQ(call["kind"], 2);
  EXPECT_EQ(call["startTimeUnixNano"], "1000000000000");
  EXPECT_THAT(lines[0], HasSubstr(R"({"key":"awqd.kernel","value":{"stringValue":"cpu/dense"}})"));
  EXPECT_THAT(lines[0], HasSubstr(R"({"key":"awqd.tokens","value":{"intValue":"3"}})"));
  std::remove(path.c_str());
  EXPECT_TRUE(absl::IsInvalidArgument(OpenSpanFile("/nonexistent/file").status()));
}

}  // namespace
}  // namespace awqd::obs
