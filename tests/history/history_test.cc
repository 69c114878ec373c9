// The checker itself: logs that pass, and logs that fail.
#include "tests/history/history.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace awqd::history {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Version 1 from 10..20 on, version 2 from 40..50 on, nothing from 70..80 on.
const std::vector<Change> kChanges = {
    {"m", 1, 10, 20}, {"m", 2, 40, 50}, {"m", kNone, 70, 80}, {"other", 7, 0, 1}};

std::vector<std::string> Check(int version, int64_t begin, int64_t end) {
  return Impossible(kChanges, {{"m", version, begin, end, 3}});
}

TEST(HistoryTest, AnAnswerIsOfTheVersionThatWasLive) {
  EXPECT_THAT(Check(1, 25, 30), IsEmpty());
  EXPECT_THAT(Check(2, 55, 60), IsEmpty());
  EXPECT_THAT(Check(kNone, 1, 5), IsEmpty());
  EXPECT_THAT(Check(kNone, 90, 95), IsEmpty());
}

TEST(HistoryTest, WhileAVersionChangesBothMayAnswer) {
  for (const int version : {1, 2}) {
    EXPECT_THAT(Check(version, 42, 48), IsEmpty()) << "within the load";
    EXPECT_THAT(Check(version, 30, 60), IsEmpty()) << "around it";
    EXPECT_THAT(Check(version, 30, 41), IsEmpty());
    EXPECT_THAT(Check(version, 49, 60), IsEmpty());
  }
  EXPECT_THAT(Check(kNone, 15, 16), IsEmpty()) << "the first load may not have got there";
  EXPECT_THAT(Check(kNone, 75, 76), IsEmpty());
  EXPECT_THAT(Check(2, 75, 76), IsEmpty());
}

TEST(HistoryTest, AnOldAnswerIsFound) {
  EXPECT_THAT(Check(1, 51, 60),
              ElementsAre("client 3, model m, from 51 to 60 ns: got an answer of version 1, "
                          "expected of version 2"));
  EXPECT_THAT(Check(2, 81, 90), ElementsAre(HasSubstr("expected \"not loaded\"")));
}

TEST(HistoryTest, AnAnswerAheadOfItsLoadIsFound) {
  EXPECT_THAT(Check(2, 25, 39), SizeIs(1));
  EXPECT_THAT(Check(1, 1, 9), SizeIs(1));
}

TEST(HistoryTest, ALostModelIsFound) {
  EXPECT_THAT(Check(kNone, 25, 30),
              ElementsAre(HasSubstr("got an answer \"not loaded\", expected of version 1")));
  EXPECT_THAT(Check(kNone, 41, 49), SizeIs(1)) << "a reload leaves no gap";
}

TEST(HistoryTest, WrongBitsAreFoundAlways) {
  EXPECT_THAT(Check(kWrong, 25, 30), ElementsAre(HasSubstr("got an answer of no version")));
  EXPECT_THAT(Check(kWrong, 0, 1000), SizeIs(1));
  EXPECT_THAT(Check(7, 0, 1000), SizeIs(1)) << "of another model";
}

TEST(HistoryTest, OfChangesThatOverlapEitherMayComeLast) {
  const std::vector<Change> changes = {{"m", 1, 10, 30}, {"m", kNone, 20, 40}, {"m", 2, 60, 70}};
  for (const int version : {1, kNone}) {
    EXPECT_THAT(Impossible(changes, {{"m", version, 50, 55}}), IsEmpty());
    EXPECT_THAT(Impossible(changes, {{"m", version, 71, 75}}), SizeIs(1));
  }
}

TEST(HistoryTest, AModelThatNobodyLoadedIsNot) {
  EXPECT_THAT(Impossible({}, {{"m", kNone, 1, 2}}), IsEmpty());
  EXPECT_THAT(Impossible({}, {{"m", 1, 1, 2}}), SizeIs(1));
}

}  // namespace
}  // namespace awqd::history
