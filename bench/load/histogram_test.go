package main

import (
	"math/rand"
	"sort"
	"testing"
)

func TestEveryValueFallsIntoTheBucketThatContainsIt(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	for i := 0; i < 100_000; i++ {
		value := random.Int63() >> uint(random.Intn(63))
		at := bucket(value)
		if value > highest(at) || (at > 0 && value <= highest(at-1)) {
			t.Fatalf("%d is in bucket %d, which ends at %d", value, at, highest(at))
		}
		if off := float64(highest(at)-value) / float64(value+1); off > 0.01 {
			t.Fatalf("%d is told as %d", value, highest(at))
		}
	}
}

func TestQuantilesAreThoseOfTheSortedValues(t *testing.T) {
	random := rand.New(rand.NewSource(2))
	first, second := &histogram{}, &histogram{}
	values := make([]int64, 10_000)
	for i := range values {
		values[i] = random.Int63n(1_000_000_000)
		if i%2 == 0 {
			first.record(values[i])
		} else {
			second.record(values[i])
		}
	}
	first.add(second)
	sort.Slice(values, func(a, b int) bool { return values[a] < values[b] })
	for _, part := range []float64{0.001, 0.5, 0.9, 0.99, 0.999, 1} {
		exact := values[int(part*float64(len(values))+0.5)-1]
		told := first.quantile(part)
		if told < exact || float64(told-exact) > 0.01*float64(exact) {
			t.Errorf("quantile %g is %d, told as %d", part, exact, told)
		}
	}
	if first.quantile(1) != values[len(values)-1] {
		t.Error("the greatest value is not told exactly")
	}
}

func TestAnEmptyHistogramHasNoLatency(t *testing.T) {
	if (&histogram{}).latency() != nil {
		t.Error("a latency of nothing")
	}
}

// A server that answers nothing for a while is felt by every message that was due meanwhile.
func TestDueTimesDoNotDependOnAnswers(t *testing.T) {
	s := &sender{job: &job{Rate: 4}}
	for i, want := range []int64{100, 250_000_100, 500_000_100, 750_000_100, 1_000_000_100} {
		if got := s.dueAt(100, int64(i)); got != want {
			t.Errorf("message %d is due at %d, not %d", i, got, want)
		}
	}
}
