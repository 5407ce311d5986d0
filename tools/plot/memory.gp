# Memory over time by category, stacked.
#
#     GNUPLOT_LIB=tools/plot gnuplot \
#         -e "out = 'memory.png'; file = 'memory.columns'; title = '01_llama'" tools/plot/memory.gp
#
# file has the columns of tools/plot/memory_columns.
load "style.gp"
categories = "params grads optimizer activations comm workspace"
stats file using 1 nooutput
set title title.": memory by category, three steps and the evaluation"
set xlabel "ms"
set ylabel "MB"
set xrange [STATS_min:STATS_max]
set yrange [0:*]
set key outside right center Left reverse
plot for [c = words(categories):1:-1] file using 1:(column(c + 1)) with fillsteps \
    lc rgb COLOR[c] title word(categories, c)
