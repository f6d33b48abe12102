package main

import "math/bits"

// A histogram of durations with a bounded error: every power of two is cut into 128 equal parts, so that a recorded
// value is off by less than one per cent, whether it is a microsecond or a minute. Recording costs a few nanoseconds.

const (
	partsBits = 7
	parts     = 1 << partsBits
)

type histogram struct {
	counts [(64 - partsBits) * parts]uint64
	total  uint64
	sum    float64
	max    int64
}

func (h *histogram) record(value int64) {
	if value < 0 {
		value = 0
	}
	h.counts[bucket(value)]++
	h.total++
	h.sum += float64(value)
	if value > h.max {
		h.max = value
	}
}

func bucket(value int64) int {
	if value < parts {
		return int(value)
	}
	shift := bits.Len64(uint64(value)) - partsBits - 1
	return (shift+1)*parts + int(value>>shift) - parts
}

// highest gives the greatest value that falls into the bucket.
func highest(bucket int) int64 {
	if bucket < parts {
		return int64(bucket)
	}
	shift := bucket/parts - 1
	return int64(bucket%parts+parts+1)<<shift - 1
}

func (h *histogram) add(other *histogram) {
	for i, count := range other.counts {
		h.counts[i] += count
	}
	h.total += other.total
	h.sum += other.sum
	if other.max > h.max {
		h.max = other.max
	}
}

// quantile gives a value that so large a part of the recorded ones does not exceed.
func (h *histogram) quantile(part float64) int64 {
	if h.total == 0 {
		return 0
	}
	wanted := uint64(part*float64(h.total) + 0.5)
	if wanted < 1 {
		wanted = 1
	}
	seen := uint64(0)
	for i, count := range h.counts {
		seen += count
		if seen >= wanted {
			if value := highest(i); value < h.max {
				return value
			}
			return h.max
		}
	}
	return h.max
}

// A latency in milliseconds, as it is reported.
type latency struct {
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
	Mean float64 `json:"mean"`
}

func (h *histogram) latency() *latency {
	if h.total == 0 {
		return nil
	}
	ms := func(value int64) float64 { return float64(value) / 1e6 }
	return &latency{
		ms(h.quantile(0.5)), ms(h.quantile(0.9)), ms(h.quantile(0.99)), ms(h.quantile(0.999)), ms(h.max),
		h.sum / float64(h.total) / 1e6,
	}
}
