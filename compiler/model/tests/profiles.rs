//! Profiles: what they mean, and where they are wrong.

use dsl::spec::{Costs, LayerCosts, Times};
use model::profile::{Profile, parse};

#[test]
fn by_stage_in_any_order() {
    let text = "# measured\nhop_us, w_us , stage,i_us,f_us\n,3,1,2.5,1\n0.25,6,0,5,0.001\n";
    let (f_ns, i_ns, w_ns) = (vec![1, 1000], vec![5000, 2500], vec![6000, 3000]);
    assert_eq!(parse(text, 2, None), Ok(Profile::Stages(Costs { f_ns, i_ns, w_ns, hop_ns: 250, u_ns: vec![] })));
}

#[test]
fn by_layer() {
    let times = |n: u64| Times { f_ns: 1000 * n, i_ns: 0, w_ns: 1000 * n };
    let each = "layer,f_us,i_us,w_us\nblock 1,3,0,3\nembed,1,0,1\nhead,4,0,4\nblock 0,2,0,2\n";
    let blocks = vec![times(2), times(3)];
    let costs = LayerCosts { embed: times(1), blocks, head: times(4), hop_ns: 0, u_ns: vec![] };
    assert_eq!(parse(each, 2, Some(2)), Ok(Profile::Layers(costs.clone())));
    let together = "layer,f_us,i_us,w_us\nblock,2,0,2\nembed,1,0,1\nhead,4,0,4\n";
    let costs = LayerCosts { blocks: vec![times(2)], ..costs };
    assert_eq!(parse(together, 2, Some(2)), Ok(Profile::Layers(costs)));
}

/// Every fault is found with its row and column.
#[test]
fn faults() {
    let stage = "stage,f_us,i_us,w_us,hop_us\n";
    let layer = "layer,f_us,i_us,w_us\n";
    let cases = [
        ("".to_owned(), 1, "1"),
        ("stage,f_us,i_us\n".to_owned(), 1, "w_us"),
        ("f_us,i_us,w_us\n".to_owned(), 1, "stage"),
        ("stage,f_us,i_us,w_us,u_us\n".to_owned(), 1, "5"),
        ("stage,f_us,f_us,w_us\n".to_owned(), 1, "3"),
        ("stage,layer,f_us,i_us,w_us\n".to_owned(), 1, "2"),
        (format!("{stage}0,1,1,1\n"), 2, "5"),
        (format!("{stage}0,1,1,1,1,1\n"), 2, "6"),
        (format!("{stage}# a\n\n0,1,2 ms,1,1\n"), 4, "i_us"),
        (format!("{stage}0,1,-1,1,1\n"), 2, "i_us"),
        (format!("{stage}0,NaN,1,1,1\n"), 2, "f_us"),
        (format!("{stage}0,0.0001,1,1,1\n"), 2, "f_us"),
        (format!("{stage}0,1,1,2e9,1\n"), 2, "w_us"),
        (format!("{stage}0,1,1,1,1\n2,1,1,1,1\n"), 3, "stage"),
        (format!("{stage}0,1,1,1,1\n0,1,1,1,1\n"), 3, "stage"),
        (format!("{stage}0,1,1,1,1\n1,1,1,1,2\n"), 3, "hop_us"),
        (format!("{stage}0,1,1,1,1\n"), 2, "stage"),
        (format!("{layer}block 2,1,1,1\n"), 2, "layer"),
        (format!("{layer}blok,1,1,1\n"), 2, "layer"),
        (format!("{layer}block,1,1,1\nblock 0,1,1,1\n"), 3, "layer"),
        (format!("{layer}block,1,1,1\nembed,1,1,1\n"), 3, "layer"),
    ];
    let mut seen = String::new();
    for (text, row, column) in cases {
        let error = parse(&text, 2, Some(2)).expect_err(&text);
        assert_eq!((error.row, &error.column[..]), (row, column), "{text}\n{error:?}");
        seen += &format!("{}; {}\n", error.diagnostic("x.csv", &(0..0)).message, error.help);
    }
    insta::assert_snapshot!(seen);
    assert_eq!(parse(&format!("{layer}embed,1,1,1\n"), 2, None).expect_err("no model").column, "layer");
}
