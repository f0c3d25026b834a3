"""What TorchRec 1.8.0 proposes and where it places; written by perf/evidence/beside_planner_parts.py --golden."""

# fmt: off
GOLDEN = {0: {'proposals': {'dynamic': [[5, 10, 13, 16], [6, 10, 11, 14], [3, 10, 11, 14], [5, 10, 11, 14],
                               [5, 10, 11, 17], [7, 10, 13, 19], [1, 10, 13, 19], [7, 10, 12, 14]],
                   'dynamic, 3 bins': [[5, 10, 13, 16], [6, 10, 11, 15], [6, 10, 11, 14], [3, 10, 11, 14],
                                       [5, 10, 11, 14], [5, 10, 11, 17], [7, 10, 13, 19], [1, 10, 13, 19]],
                   'greedy': [[6, 10, 12, 14], [1, 10, 12, 14], [4, 10, 12, 14], [2, 10, 12, 14],
                              [7, 10, 12, 14], [3, 10, 12, 14], [0, 10, 12, 14], [8, 10, 12, 14]],
                   'greedy by sum': [[1, 10, 13, 14], [6, 10, 13, 14], [2, 10, 13, 14], [4, 10, 13, 14],
                                     [3, 10, 13, 14], [5, 10, 13, 14], [5, 10, 13, 15], [5, 10, 13, 19]],
                   'greedy, threshold 2': [[6, 10, 12, 14], [1, 10, 12, 14], [4, 10, 12, 14], [2, 10, 12, 14],
                                           [7, 10, 12, 14], [3, 10, 12, 14]],
                   'grid': [[6, 10, 12, 14], [6, 10, 12, 15], [6, 10, 12, 18], [6, 10, 12, 19],
                            [6, 10, 12, 17], [6, 10, 12, 16], [6, 10, 13, 14], [6, 10, 13, 15]],
                   'grid, at most 100': [],
                   'uniform': [],
                   'uniform by sum': []},
     'ranks': {'memory': [[2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 1],
                          ('PlannerError',
                           "Device partition failed. Couldn't find a rank for shard Shard size: (64, 8), "
                           'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                           'Perf(fwd_compute=0.125, fwd_comms=0.0625, bwd_compute=0.125, bwd_comms=0.0, '
                           'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_0, '
                           'largest device storage: Storage(hbm=37748736, ddr=167772160, ssd=2199023255552)'),
                          [1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 6]],
               'memory, loose': [[2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 1],
                                 ('PlannerError',
                                  "Device partition failed. Couldn't find a rank for shard Shard size: (64, "
                                  '8), offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                                  'Perf(fwd_compute=0.125, fwd_comms=0.0625, bwd_compute=0.125, '
                                  'bwd_comms=0.0, input_dist_comms=0.0, prefetch_compute=0.0), rank: None of '
                                  'table table_0, largest device storage: Storage(hbm=37748736, '
                                  'ddr=167772160, ssd=2199023255552)'),
                                 [1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 6]],
               'modules': [[0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 1],
                           ('PlannerError',
                            "Device partition failed. Couldn't find a rank for shard Shard size: (64, 8), "
                            'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                            'Perf(fwd_compute=0.125, fwd_comms=0.0625, bwd_compute=0.125, bwd_comms=0.0, '
                            'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_0, '
                            'largest device storage: Storage(hbm=37748736, ddr=167772160, '
                            'ssd=2199023255552)'),
                           [1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 6]],
               'perf': [[0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 1],
                        ('PlannerError',
                         "Device partition failed. Couldn't find a rank for shard Shard size: (64, 8), "
                         'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                         'Perf(fwd_compute=0.125, fwd_comms=0.0625, bwd_compute=0.125, bwd_comms=0.0, '
                         'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_0, largest '
                         'device storage: Storage(hbm=37748736, ddr=167772160, ssd=2199023255552)'),
                        [1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 6]],
               'storage': [[0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 1],
                           ('PlannerError',
                            "Device partition failed. Couldn't find a rank for shard Shard size: (64, 8), "
                            'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                            'Perf(fwd_compute=0.125, fwd_comms=0.0625, bwd_compute=0.125, bwd_comms=0.0, '
                            'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_0, '
                            'largest device storage: Storage(hbm=37748736, ddr=167772160, '
                            'ssd=2199023255552)'),
                           [1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 5, 6]]}},
 3: {'proposals': {'dynamic': [[1, 6, 9], [2, 7, 12], [0, 7, 13], [4, 7, 12], [2, 7, 10], [5, 7, 10],
                               [4, 7, 10], [2, 7, 13]],
                   'dynamic, 3 bins': [[1, 6, 9], [4, 7, 12], [4, 7, 10], [4, 7, 13], [4, 8, 10], [4, 8, 13]],
                   'greedy': [[4, 7, 13], [4, 6, 13], [4, 6, 14], [3, 6, 14], [1, 6, 14]],
                   'greedy by sum': [[4, 8, 13], [4, 8, 14], [4, 6, 14], [2, 6, 14], [1, 6, 14]],
                   'greedy, threshold 2': [[4, 7, 13], [4, 6, 13], [4, 6, 14], [3, 6, 14], [1, 6, 14]],
                   'grid': [[4, 7, 13], [4, 7, 14], [4, 7, 9], [4, 7, 15], [4, 7, 10], [4, 7, 12], [4, 7, 11],
                            [4, 6, 13]],
                   'grid, at most 100': [],
                   'uniform': [[1, 7, 12]],
                   'uniform by sum': [[1, 7, 12]]},
     'ranks': {'memory': [[1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 7, 0], [5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 6, 0],
                          [5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 6, 5]],
               'memory, loose': [[1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 7, 0], [5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 6, 0],
                                 [5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 6, 5]],
               'modules': [[2, 7, 0, 1, 2, 3, 4, 5, 6, 7, 1, 1], [6, 5, 0, 1, 2, 3, 4, 5, 6, 7, 5, 3],
                           [5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 6, 5]],
               'perf': [[1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 7, 0], [5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 6, 0],
                        [5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 6, 5]],
               'storage': [[2, 7, 0, 1, 2, 3, 4, 5, 6, 7, 1, 1], [6, 5, 0, 1, 2, 3, 4, 5, 6, 7, 5, 3],
                           [5, 3, 0, 1, 2, 3, 4, 5, 6, 7, 6, 5]]}},
 5: {'proposals': {'dynamic': [[0, 8, 17, 18, 23, 28, 36, 38], [2, 9, 17, 19, 24, 35, 36, 38],
                               [2, 9, 17, 19, 22, 29, 36, 39], [2, 15, 17, 19, 24, 29, 36, 38],
                               [2, 13, 17, 19, 24, 29, 36, 39], [2, 9, 17, 19, 22, 35, 36, 39],
                               [2, 9, 17, 19, 22, 29, 36, 38], [2, 15, 17, 19, 22, 29, 36, 39]],
                   'dynamic, 3 bins': [[0, 8, 17, 18, 23, 28, 36, 38], [2, 9, 17, 19, 24, 35, 36, 38],
                                       [2, 15, 17, 19, 24, 29, 36, 38], [2, 13, 17, 19, 24, 29, 36, 39],
                                       [2, 9, 17, 19, 22, 35, 36, 39], [2, 15, 17, 19, 22, 29, 36, 39],
                                       [2, 13, 17, 19, 24, 29, 36, 38], [2, 15, 17, 19, 23, 29, 36, 39]],
                   'greedy': [[6, 13, 17, 19, 22, 29, 36, 39], [6, 13, 17, 18, 22, 29, 36, 39],
                              [6, 13, 17, 18, 22, 34, 36, 39], [6, 13, 17, 18, 23, 34, 36, 39],
                              [7, 13, 17, 18, 23, 34, 36, 39], [7, 13, 17, 18, 23, 34, 36, 38],
                              [7, 16, 17, 18, 23, 34, 36, 38], [7, 16, 17, 18, 24, 34, 36, 38]],
                   'greedy by sum': [[6, 13, 17, 19, 22, 29, 36, 38], [6, 13, 17, 18, 22, 29, 36, 38],
                                     [6, 13, 17, 18, 22, 28, 36, 38], [6, 13, 17, 18, 23, 28, 36, 38],
                                     [7, 13, 17, 18, 23, 28, 36, 38], [7, 13, 17, 18, 23, 28, 36, 39],
                                     [7, 16, 17, 18, 23, 28, 36, 39], [7, 16, 17, 18, 26, 28, 36, 39]],
                   'greedy, threshold 2': [[6, 13, 17, 19, 22, 29, 36, 39], [6, 13, 17, 18, 22, 29, 36, 39],
                                           [6, 13, 17, 18, 22, 34, 36, 39], [6, 13, 17, 18, 23, 34, 36, 39],
                                           [7, 13, 17, 18, 23, 34, 36, 39], [7, 13, 17, 18, 23, 34, 36, 38],
                                           [7, 16, 17, 18, 23, 34, 36, 38]],
                   'grid': [],
                   'grid, at most 100': [],
                   'uniform': [],
                   'uniform by sum': []},
     'ranks': {'memory': [('PlannerError',
                           "Device partition failed. Couldn't find a rank for shard Shard size: (1000, 8), "
                           'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                           'Perf(fwd_compute=0.0625, fwd_comms=0.125, bwd_compute=0.5, bwd_comms=0.0, '
                           'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_5, '
                           'largest device storage: Storage(hbm=75497472, ddr=335544320, ssd=2199023255552)'),
                          ('PlannerError',
                           "Device partition failed. Couldn't find a rank for shard Shard size: (1000, 8), "
                           'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                           'Perf(fwd_compute=0.0625, fwd_comms=0.125, bwd_compute=0.5, bwd_comms=0.0, '
                           'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_5, '
                           'largest device storage: Storage(hbm=75497472, ddr=335544320, ssd=2199023255552)'),
                          [9, 6, 7, 3, 1, 7, 4, 10, 8, 9, 10, 11, 0, 1, 2, 3, 6, 5, 0, 1, 2, 3, 4, 5, 6, 7, 8,
                           9, 10, 11]],
               'memory, loose': [('PlannerError',
                                  "Device partition failed. Couldn't find a rank for shard Shard size: "
                                  '(1000, 8), offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), '
                                  'perf: Perf(fwd_compute=0.0625, fwd_comms=0.125, bwd_compute=0.5, '
                                  'bwd_comms=0.0, input_dist_comms=0.0, prefetch_compute=0.0), rank: None of '
                                  'table table_5, largest device storage: Storage(hbm=75497472, '
                                  'ddr=335544320, ssd=2199023255552)'),
                                 ('PlannerError',
                                  "Device partition failed. Couldn't find a rank for shard Shard size: "
                                  '(1000, 8), offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), '
                                  'perf: Perf(fwd_compute=0.0625, fwd_comms=0.125, bwd_compute=0.5, '
                                  'bwd_comms=0.0, input_dist_comms=0.0, prefetch_compute=0.0), rank: None of '
                                  'table table_5, largest device storage: Storage(hbm=75497472, '
                                  'ddr=335544320, ssd=2199023255552)'),
                                 [9, 6, 7, 3, 1, 7, 4, 10, 8, 9, 10, 11, 0, 1, 2, 3, 6, 5, 0, 1, 2, 3, 4, 5,
                                  6, 7, 8, 9, 10, 11]],
               'modules': [('PlannerError',
                            "Device partition failed. Couldn't find a rank for shard Shard size: (1000, 8), "
                            'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                            'Perf(fwd_compute=0.0625, fwd_comms=0.0, bwd_compute=0.0, bwd_comms=0.125, '
                            'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_3, '
                            'largest device storage: Storage(hbm=75497472, ddr=335544320, '
                            'ssd=2199023255552)'),
                           ('PlannerError',
                            "Device partition failed. Couldn't find a rank for shard Shard size: (1000, 8), "
                            'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                            'Perf(fwd_compute=0.0625, fwd_comms=0.125, bwd_compute=0.5, bwd_comms=0.0, '
                            'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_5, '
                            'largest device storage: Storage(hbm=75497472, ddr=335544320, '
                            'ssd=2199023255552)'),
                           [0, 6, 5, 7, 6, 11, 10, 9, 4, 5, 6, 7, 0, 1, 2, 3, 1, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8,
                            9, 10, 11]],
               'perf': [('PlannerError',
                         "Device partition failed. Couldn't find a rank for shard Shard size: (1000, 8), "
                         'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                         'Perf(fwd_compute=0.0625, fwd_comms=0.125, bwd_compute=0.5, bwd_comms=0.0, '
                         'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_5, largest '
                         'device storage: Storage(hbm=75497472, ddr=335544320, ssd=2199023255552)'),
                        ('PlannerError',
                         "Device partition failed. Couldn't find a rank for shard Shard size: (1000, 8), "
                         'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                         'Perf(fwd_compute=0.0625, fwd_comms=0.125, bwd_compute=0.5, bwd_comms=0.0, '
                         'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_5, largest '
                         'device storage: Storage(hbm=75497472, ddr=335544320, ssd=2199023255552)'),
                        [9, 6, 7, 3, 1, 7, 4, 10, 8, 9, 10, 11, 0, 1, 2, 3, 6, 5, 0, 1, 2, 3, 4, 5, 6, 7, 8,
                         9, 10, 11]],
               'storage': [('PlannerError',
                            "Device partition failed. Couldn't find a rank for shard Shard size: (1000, 8), "
                            'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                            'Perf(fwd_compute=0.0625, fwd_comms=0.0, bwd_compute=0.0, bwd_comms=0.125, '
                            'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_3, '
                            'largest device storage: Storage(hbm=75497472, ddr=335544320, '
                            'ssd=2199023255552)'),
                           ('PlannerError',
                            "Device partition failed. Couldn't find a rank for shard Shard size: (1000, 8), "
                            'offset: (0, 0), storage: Storage(hbm=100663296, ddr=0, ssd=0), perf: '
                            'Perf(fwd_compute=0.0625, fwd_comms=0.125, bwd_compute=0.5, bwd_comms=0.0, '
                            'input_dist_comms=0.0, prefetch_compute=0.0), rank: None of table table_5, '
                            'largest device storage: Storage(hbm=75497472, ddr=335544320, '
                            'ssd=2199023255552)'),
                           [0, 6, 5, 7, 6, 11, 10, 9, 4, 5, 6, 7, 0, 1, 2, 3, 1, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8,
                            9, 10, 11]]}},
 8: {'proposals': {'dynamic': [[0, 2, 10], [1, 4, 9], [1, 6, 9], [1, 5, 9], [1, 6, 10], [1, 5, 10],
                               [0, 6, 10], [0, 5, 10]],
                   'dynamic, 3 bins': [[0, 2, 10], [1, 4, 9], [1, 6, 9], [1, 5, 9], [1, 6, 10], [1, 5, 10],
                                       [0, 6, 10], [0, 5, 10]],
                   'greedy': [[1, 5, 9], [0, 5, 9], [0, 5, 10], [0, 6, 10], [0, 2, 10], [0, 4, 10],
                              [0, 7, 10]],
                   'greedy by sum': [[1, 5, 9], [0, 5, 9], [0, 5, 10], [0, 6, 10], [0, 4, 10], [0, 7, 10]],
                   'greedy, threshold 2': [[1, 5, 9], [0, 5, 9], [0, 5, 10], [0, 6, 10]],
                   'grid': [[1, 5, 9], [1, 5, 10], [1, 6, 9], [1, 6, 10], [1, 2, 9], [1, 2, 10], [1, 4, 9],
                            [1, 4, 10]],
                   'grid, at most 100': [[1, 5, 9], [1, 5, 10], [1, 6, 9], [1, 6, 10], [1, 2, 9], [1, 2, 10],
                                         [1, 4, 9], [1, 4, 10]],
                   'uniform': [[1, 4, 9]],
                   'uniform by sum': [[1, 4, 9]]},
     'ranks': {'memory': [[2, 3, 2, 0, 0, 1], [0, 1, 2, 3, 2, 2, 2, 3], [0, 1, 2, 3, 1, 1, 2, 3]],
               'memory, loose': [[2, 3, 2, 0, 0, 1], [0, 1, 2, 3, 2, 2, 2, 3], [0, 1, 2, 3, 1, 1, 2, 3]],
               'modules': [[0, 1, 0, 2, 2, 3], [0, 1, 2, 3, 2, 2, 2, 3], [0, 1, 2, 3, 2, 2, 2, 3]],
               'perf': [[2, 3, 2, 0, 0, 1], [0, 1, 2, 3, 2, 2, 2, 3], [0, 1, 2, 3, 1, 1, 2, 3]],
               'storage': [[0, 1, 0, 2, 2, 3], [0, 1, 2, 3, 2, 2, 2, 3], [0, 1, 2, 3, 2, 2, 2, 3]]}},
 11: {'proposals': {'dynamic': [[0, 13, 18, 20, 23], [6, 10, 18, 21, 24], [6, 10, 18, 19, 24],
                                [6, 10, 18, 20, 24], [6, 12, 18, 21, 24], [6, 12, 18, 19, 24],
                                [6, 12, 18, 20, 24], [6, 17, 18, 20, 24]],
                    'dynamic, 3 bins': [[0, 13, 18, 20, 23], [6, 10, 18, 19, 24], [6, 10, 18, 20, 24],
                                        [6, 12, 18, 19, 24], [6, 12, 18, 20, 24], [6, 10, 18, 20, 23],
                                        [6, 12, 18, 21, 23], [6, 12, 18, 19, 23]],
                    'greedy': [[2, 12, 18, 19, 24], [8, 12, 18, 19, 24], [8, 12, 18, 19, 23],
                               [8, 15, 18, 19, 23], [8, 15, 18, 20, 23], [8, 11, 18, 20, 23],
                               [8, 10, 18, 20, 23], [8, 13, 18, 20, 23]],
                    'greedy by sum': [[2, 12, 18, 19, 24], [1, 12, 18, 19, 24], [1, 12, 18, 19, 23],
                                      [8, 12, 18, 19, 23], [8, 17, 18, 19, 23], [8, 17, 18, 20, 23],
                                      [8, 14, 18, 20, 23], [8, 13, 18, 20, 23]],
                    'greedy, threshold 2': [[2, 12, 18, 19, 24], [8, 12, 18, 19, 24], [8, 12, 18, 19, 23],
                                            [8, 15, 18, 19, 23]],
                    'grid': [[2, 12, 18, 19, 24], [2, 12, 18, 19, 23], [2, 12, 18, 19, 22],
                             [2, 12, 18, 19, 25], [2, 12, 18, 20, 24], [2, 12, 18, 20, 23],
                             [2, 12, 18, 20, 22], [2, 12, 18, 20, 25]],
                    'grid, at most 100': [],
                    'uniform': [[0, 15, 18, 21, 24]],
                    'uniform by sum': [[0, 15, 18, 21, 24]]},
      'ranks': {'memory': [[8, 12, 9, 10, 0, 1, 2, 3, 13, 14, 4, 5, 6, 7],
                           [8, 9, 10, 14, 0, 1, 2, 3, 12, 13, 4, 5, 6, 7],
                           [8, 9, 10, 14, 4, 5, 6, 7, 12, 13, 0, 1, 2, 3]],
                'memory, loose': [[12, 13, 6, 14, 0, 1, 2, 3, 4, 5, 8, 9, 10, 11],
                                  [12, 13, 6, 14, 0, 1, 2, 3, 4, 5, 8, 9, 10, 11],
                                  [12, 13, 6, 14, 0, 1, 2, 3, 4, 5, 8, 9, 10, 11]],
                'modules': [[8, 12, 9, 2, 4, 5, 6, 7, 0, 1, 12, 13, 14, 15],
                            [14, 15, 12, 13, 4, 5, 6, 7, 0, 1, 8, 9, 10, 11],
                            [13, 14, 8, 12, 4, 5, 6, 7, 0, 1, 8, 9, 10, 11]],
                'perf': [[8, 12, 9, 10, 0, 1, 2, 3, 13, 14, 4, 5, 6, 7],
                         [8, 9, 10, 14, 0, 1, 2, 3, 12, 13, 4, 5, 6, 7],
                         [8, 9, 10, 14, 4, 5, 6, 7, 12, 13, 0, 1, 2, 3]],
                'storage': [[0, 4, 12, 1, 12, 13, 14, 15, 5, 6, 8, 9, 10, 11],
                            [5, 6, 4, 8, 8, 9, 10, 11, 12, 13, 0, 1, 2, 3],
                            [1, 2, 0, 4, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15]]}},
 21: {'proposals': {'dynamic': [[2, 12, 17, 11, 14], [7, 13, 16, 9, 14], [6, 13, 16, 9, 14],
                                [4, 13, 16, 9, 14], [0, 13, 16, 9, 14], [2, 13, 16, 9, 14],
                                [7, 13, 18, 9, 14], [7, 13, 17, 9, 14]],
                    'dynamic, 3 bins': [[2, 12, 17, 11, 14], [7, 13, 16, 9, 14], [7, 13, 18, 9, 14],
                                        [4, 13, 18, 9, 14], [7, 13, 16, 10, 14], [7, 13, 18, 10, 14],
                                        [7, 13, 18, 11, 14], [4, 13, 18, 11, 14]],
                    'greedy': [[4, 10, 13, 14, 18], [4, 10, 12, 14, 18], [4, 11, 12, 14, 18],
                               [2, 11, 12, 14, 18], [2, 9, 12, 14, 18], [2, 9, 12, 15, 18],
                               [2, 9, 12, 15, 16], [2, 9, 12, 15, 17]],
                    'greedy by sum': [[4, 10, 13, 14, 18], [4, 10, 12, 14, 18], [4, 11, 12, 14, 18],
                                      [7, 11, 12, 14, 18], [1, 11, 12, 14, 18], [2, 11, 12, 14, 18],
                                      [2, 9, 12, 14, 18], [2, 9, 12, 15, 18]],
                    'greedy, threshold 2': [[4, 10, 13, 14, 18], [4, 10, 12, 14, 18], [4, 11, 12, 14, 18],
                                            [2, 11, 12, 14, 18]],
                    'grid': [[4, 10, 13, 14, 18], [4, 10, 13, 14, 16], [4, 10, 13, 14, 17],
                             [4, 10, 13, 15, 18], [4, 10, 13, 15, 16], [4, 10, 13, 15, 17],
                             [4, 10, 12, 14, 18], [4, 10, 12, 14, 16]],
                    'grid, at most 100': [],
                    'uniform': [],
                    'uniform by sum': []},
      'ranks': {'memory': [[0, 0, 2, 3, 1, 0, 1, 2, 3], [3, 3, 3, 0, 2, 0, 1, 0, 1],
                           [3, 3, 3, 0, 2, 0, 1, 0, 1]],
                'memory, loose': [[0, 0, 0, 2, 1, 3, 2, 0, 1], [2, 3, 2, 1, 0, 3, 3, 0, 1],
                                  [2, 2, 2, 1, 0, 3, 3, 0, 1]],
                'modules': [[3, 3, 0, 2, 1, 1, 0, 2, 3], [3, 3, 0, 2, 1, 2, 3, 0, 1],
                            [3, 3, 0, 2, 1, 2, 3, 0, 1]],
                'perf': [[0, 0, 2, 3, 3, 0, 1, 2, 3], [3, 3, 3, 0, 2, 0, 1, 0, 1],
                         [3, 3, 3, 0, 2, 0, 1, 0, 1]],
                'storage': [[3, 3, 0, 2, 1, 1, 0, 2, 3], [3, 3, 0, 2, 0, 1, 1, 2, 3],
                            [0, 1, 2, 3, 0, 0, 1, 2, 3]]}}}
