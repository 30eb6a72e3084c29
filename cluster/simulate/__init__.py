"""`raydix simulate`: the real scheduler in virtual time, with a worker that knows how long a step takes.

::

    traces, synthetic, tokens    requests: when they arrive, which tokens they share, how long they answer
    cost_model                   seconds of a step from its shape: a card's data sheet, or a calibration file
    engine                       one replica: a Scheduler, a timed worker and a clock
    fleet, routers               many replicas, and who gets which request
    metrics, report              latencies, rates, table and plot
    real_engine, calibrate       the CPU engine measured: fits the cost model, and checks what it predicts
"""
