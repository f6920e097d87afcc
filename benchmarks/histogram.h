/*
 * A histogram of latencies that is exact to three digits and never allocates.
 *
 * Owns: the buckets. Below 2048 ns each value has its own; above, each doubling is cut into 1024
 * (as HdrHistogram does), so a bucket is at most 0.1 % wide. One rule: a percentile is the upper
 * edge of its bucket, never a flattering lower one, and at most the true maximum.
 */
#ifndef COMETMQ_BENCH_HISTOGRAM_H
#define COMETMQ_BENCH_HISTOGRAM_H

#include <stdint.h>
#include <string.h>

enum { HISTOGRAM_STEPS = 1024, HISTOGRAM_BUCKETS = 54 * HISTOGRAM_STEPS + 2 * HISTOGRAM_STEPS };

typedef struct {
    uint64_t count, most_ns;
    double sum_ns;
    uint64_t buckets[HISTOGRAM_BUCKETS];
} Histogram;

static inline void histogram_add(Histogram *histogram, uint64_t ns) {
    int shift = ns < 2 * HISTOGRAM_STEPS ? 0 : 53 - __builtin_clzll(ns);
    histogram->buckets[(uint64_t)shift * HISTOGRAM_STEPS + (ns >> shift)]++;
    histogram->count++;
    histogram->sum_ns += (double)ns;
    if (ns > histogram->most_ns)
        histogram->most_ns = ns;
}

static inline uint64_t histogram_ns(const Histogram *histogram, double share) {
    uint64_t wanted = (uint64_t)(share * (double)histogram->count), seen = 0;
    for (uint64_t bucket = 0; bucket < HISTOGRAM_BUCKETS; bucket++) {
        seen += histogram->buckets[bucket];
        if (seen > wanted || (seen == histogram->count && seen)) {
            uint64_t shift = bucket < 2 * HISTOGRAM_STEPS ? 0 : bucket / HISTOGRAM_STEPS - 1;
            uint64_t top = ((bucket - shift * HISTOGRAM_STEPS + 1) << shift) - 1;
            return top < histogram->most_ns ? top : histogram->most_ns;
        }
    }
    return 0;
}

static inline void histogram_clear(Histogram *histogram) {
    memset(histogram, 0, sizeof *histogram);
}

#endif
